"""Leaves the folder to be written by anyone."""

from __future__ import annotations

from pathlib import Path

REASON = "UNTRUSTED"


def attack(aot: Path) -> None:
    aot.chmod(0o777)

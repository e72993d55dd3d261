"""Leaves the manifest to be written by anyone."""

from __future__ import annotations

from pathlib import Path

REASON = "UNTRUSTED"


def attack(aot: Path) -> None:
    (aot / "manifest.json").chmod(0o666)

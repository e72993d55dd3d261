"""Leaves a payload to be written by anyone."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "UNTRUSTED"


def attack(aot: Path) -> None:
    (aot / t.PAYLOAD).chmod(0o646)

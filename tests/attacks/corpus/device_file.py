"""Puts a device that never ends in the place of a payload."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / t.PAYLOAD
    path.unlink()
    path.symlink_to("/dev/zero")

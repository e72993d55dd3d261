"""Puts a link to a file outside in the place of a payload; its bytes are the right ones."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / t.PAYLOAD
    moved = path.rename(aot.parent / "moved")
    path.symlink_to(moved)

"""Puts a link in the place of the whole folder."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    moved = aot.rename(aot.parent / "moved")
    aot.symlink_to(moved, target_is_directory=True)

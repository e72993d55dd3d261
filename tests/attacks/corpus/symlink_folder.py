"""Puts a link to a folder outside in the place of a function's folder; its files are the right ones."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    moved = (aot / "step").rename(aot.parent / "moved")
    (aot / "step").symlink_to(moved, target_is_directory=True)

"""Puts a link in the place of the manifest."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    moved = path.rename(aot.parent / "moved.json")
    path.symlink_to(moved)

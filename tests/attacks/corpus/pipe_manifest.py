"""Puts a pipe that nobody writes to in the place of the manifest."""

from __future__ import annotations

import os
from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    path.unlink()
    os.mkfifo(path)

"""Is larger than any manifest."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    with open(aot / "manifest.json", "r+b") as f:
        f.truncate(1 << 40)

"""Goes on behind its end."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    path.write_bytes(path.read_bytes() + b"{}")

"""Is empty."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    (aot / "manifest.json").write_bytes(b"")

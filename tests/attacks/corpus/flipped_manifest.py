"""Has one bit of the manifest flipped."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

"""Has two bodies, one for the digest and one for the reader."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b',"body":{}}')

"""Begins with a byte-order mark."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / "manifest.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

"""Does not say how large it becomes."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t
import zstandard

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    raw = b"x" * 1000
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    t.replace_payload(aot, compressor.compress(raw), raw)

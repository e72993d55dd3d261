"""Decompresses half a kilobyte to 8 GB."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    stored = t.compressed_zeros(1 << 33)
    (aot / t.PAYLOAD).write_bytes(stored)
    body = t.read_body(aot)
    t.describe(t.variant(body), stored, b"")
    t.variant(body)["raw_nbytes"] = 1 << 33
    t.write_body(aot, body)

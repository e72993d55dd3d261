"""Decompresses to 256 MB where 10 kB are declared."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    stored = t.compressed_zeros(1 << 28)
    raw_nbytes = t.variant(t.read_body(aot))["raw_nbytes"]
    (aot / t.PAYLOAD).write_bytes(stored)
    body = t.read_body(aot)
    t.describe(t.variant(body), stored, b"")
    t.variant(body)["raw_nbytes"] = raw_nbytes
    t.write_body(aot, body)

"""Has payload and stored digest replaced, but not the digest of the raw bytes."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    raw = b"\0" * 5000
    stored = t.compress(raw)
    (aot / t.PAYLOAD).write_bytes(stored)
    body = t.read_body(aot)
    raw_digest = t.variant(body)["raw_sha256"]
    t.describe(t.variant(body), stored, raw)
    t.variant(body)["raw_sha256"] = raw_digest
    t.write_body(aot, body)

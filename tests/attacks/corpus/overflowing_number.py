"""Holds a number that does not fit into 64 bits."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["topology"]["count"] = 1 << 64
    t.write_body(aot, body)

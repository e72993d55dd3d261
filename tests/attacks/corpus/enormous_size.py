"""Declares a size of an exabyte."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["nbytes"] = t.variant(body)["raw_nbytes"] = 1 << 60
    t.write_body(aot, body)

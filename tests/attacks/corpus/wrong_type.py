"""Holds a string where a number belongs."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["nbytes"] = "12"
    t.write_body(aot, body)

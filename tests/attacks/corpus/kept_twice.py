"""Hands one argument to the executable twice."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["kept"] = [0, 0]
    t.write_body(aot, body)

"""Holds a NaN, which JSON does not know."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    t.write_text(aot, text.replace(b'"cost":{', b'"cost":{"x":NaN,', 1))

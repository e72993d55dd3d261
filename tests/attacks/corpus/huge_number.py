"""Holds a number of a million digits, which takes some readers minutes."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    t.write_text(aot, text.replace(b'"count":1', b'"count":' + b"9" * 1_000_000, 1))

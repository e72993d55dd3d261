"""Nests a million lists, to overflow a reader's stack."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    deep = b"[" * 1_000_000 + b"]" * 1_000_000
    t.write_text(aot, b'{"new":' + deep + b"," + text[1:])

"""Holds four million empty lists: small in the file, large in memory."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    t.write_text(aot, b'{"new":[' + b"[]," * 4_000_000 + b"[]]," + text[1:])

"""Says one thing to readers that take the first of two equal names and another to those that take the last."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    t.write_text(aot, b'{"functions":{},' + text[1:])

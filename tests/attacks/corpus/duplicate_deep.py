"""The same, deep inside a signature."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    text = t.compact(t.read_body(aot))
    t.write_text(aot, text.replace(b'"donated":false', b'"donated":true,"donated":false', 1))

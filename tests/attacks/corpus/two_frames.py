"""Has a second compressed frame behind the first."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    raw = b"x" * 1000
    t.replace_payload(aot, t.compress(raw) * 2, raw)

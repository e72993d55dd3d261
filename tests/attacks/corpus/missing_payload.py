"""Lacks the payload."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    (aot / t.PAYLOAD).unlink()

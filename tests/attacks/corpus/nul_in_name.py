"""Ends a name early for whoever reads it as C does."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "0.pjrt.zst\0.txt")

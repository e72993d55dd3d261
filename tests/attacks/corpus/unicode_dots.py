"""Climbs out by characters that some systems normalise to dots and slashes."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "\uff0e\uff0e\uff0f0.pjrt.zst")

"""Has the end of the payload cut off."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / t.PAYLOAD
    path.write_bytes(path.read_bytes()[:-10])

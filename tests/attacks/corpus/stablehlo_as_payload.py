"""Has StableHLO in the place of the executable."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    (aot / t.PAYLOAD).write_bytes((aot / t.PORTABLE).read_bytes())

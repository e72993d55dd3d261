"""Says it is of a newer major version, whose fields mean something else."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "FORMAT_VERSION"


def attack(aot: Path) -> None:
    t.write_body(aot, {"functions": []}, (2, 0))

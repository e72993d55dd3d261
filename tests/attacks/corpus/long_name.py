"""Names a file longer than file systems can, or a buffer expects."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "a" * 100_000)

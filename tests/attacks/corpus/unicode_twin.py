"""Names a file by letters that look like others."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "0.p\u0458rt.zst")

"""Names the folder itself as a file."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "")

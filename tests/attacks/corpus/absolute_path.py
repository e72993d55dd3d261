"""Names a file by an absolute path, to have something outside the folder read."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "/etc/hostname")

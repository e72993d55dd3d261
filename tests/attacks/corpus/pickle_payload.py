"""Has a pickle that runs a command in the place of the payload, in the hope that someone unpickles it."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    (aot / t.PAYLOAD).write_bytes(b"cposix\nsystem\n(S'touch unpickled'\ntR.")

"""Puts a pipe that nobody writes to in the place of a payload, to make the reader wait for ever."""

from __future__ import annotations

import os
from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    path = aot / t.PAYLOAD
    path.unlink()
    os.mkfifo(path)

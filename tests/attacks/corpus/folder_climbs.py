"""Climbs out of the folder by the name of a function's folder."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    body["functions"]["step"]["folder"] = ".."
    t.write_body(aot, body)

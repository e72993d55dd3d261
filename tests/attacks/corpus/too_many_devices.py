"""Says it is for twelve devices where the executable is for one: native code would abort."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["topology"]["count"] = 12
    t.write_body(aot, body)

"""Says it is for no device."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["topology"].update(count=0, ids=[], processes=[], replicas=0)
    t.write_body(aot, body)

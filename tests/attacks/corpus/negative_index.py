"""Points before the beginning of a table, which Python would take from its end."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["in_shardings"][0] = -1
    t.write_body(aot, body)

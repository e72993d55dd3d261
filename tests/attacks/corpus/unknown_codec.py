"""Names a codec that this reader does not have."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    t.variant(body)["codec"] = "pickle"
    t.write_body(aot, body)

"""Nests the tree of a result, to overflow whoever builds it."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    body = t.read_body(aot)
    for _ in range(150):
        t.signature(body)["output_tree"] = {"list": [t.signature(body)["output_tree"]]}
    t.write_body(aot, body)

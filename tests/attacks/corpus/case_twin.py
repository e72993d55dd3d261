"""Names two files that are one where case does not count."""

from __future__ import annotations

from pathlib import Path

import attack_tools as t

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    t.rename_payload(aot, "0.PJRT.zst")
    (aot / "step/0/0.PJRT.zst").write_bytes((aot / t.PAYLOAD).read_bytes())

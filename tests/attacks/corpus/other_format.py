"""Is some other JSON."""

from __future__ import annotations

from pathlib import Path

REASON = "CORRUPT"


def attack(aot: Path) -> None:
    (aot / "manifest.json").write_bytes(
        b'{"format":"safetensors","version":[1,0],"sha256":"","body":{}}'
    )

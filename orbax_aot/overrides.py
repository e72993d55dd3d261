"""What environment variables override: ways out that need no change of code."""

from __future__ import annotations

import os


def is_off() -> bool:
    """Whether `ORBAX_AOT=off` asks for weights only."""
    return os.environ.get("ORBAX_AOT", "").lower() in ("off", "0", "false", "no")

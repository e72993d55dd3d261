"""A process that finds a compiler for machines that are not here, which is not installed where other tests run."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).parents[2]
CHECKPOINT = "import sys, pathlib, cli_checkpoint; cli_checkpoint.save(pathlib.Path(sys.argv[1]))"


def run(compiler: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on eight CPU devices, with the packages in the folder `compiler`."""
    path = (compiler, REPOSITORY, REPOSITORY / "tests/cli", os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, env=environment
    )

"""A process may end while a restored function still runs for the first time."""

from __future__ import annotations

import os
import subprocess
import sys

_CHILD = """
import jax, jax.numpy as jnp
from orbax_aot import crash

slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: jnp.tanh(y @ y), x))
x = jnp.ones((700, 700))
crash.FirstRun("0" * 64).watch(lambda: slow(x), jax.block_until_ready)
print("over")
"""


def test_a_process_that_ends_during_a_first_run_ends_well(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]  # and it leaves no marker of a crash

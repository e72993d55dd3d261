"""Restores each golden checkpoint with the JAX that is installed; prints what came of it, a JSON line for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import make_golden
import numpy as np

import orbax_aot as oaot


def _restore(folder: Path) -> dict[str, Any]:
    # A checkout has whatever owner and modes it was given.
    handler = oaot.AotHandler(trust=oaot.Trust.anyone())
    state, fns = handler.restore(folder / "item", oaot.AotRestore())
    batch = jnp.asarray(make_golden.BATCH, jnp.float32)
    weights = {name: np.asarray(leaf).tolist() for name, leaf in state.items()}
    arguments = {"train_step": (state, batch), "look_up": (batch,), "sharded": (state["w"],)}
    found: dict[str, Any] = {"weights": weights, "verdicts": {}, "reasons": {}, "results": {}}
    for name, report in fns.report.items():
        found["verdicts"][name] = report.verdict.name
        found["reasons"][name] = sorted({r.code.name for r in report.reasons})
    for name, args in arguments.items():
        if found["verdicts"][name] != "REFUSED":
            args = tuple(jax.tree.map(lambda x: np.asarray(x), a) for a in args)
            leaves = jax.tree.leaves(fns[name](*args))
            found["results"][name] = [np.asarray(leaf).tolist() for leaf in leaves]
    return found


for folder in sorted(Path(__file__).parent.glob("format-*")):
    print(json.dumps({"name": folder.name, **_restore(folder)}), flush=True)

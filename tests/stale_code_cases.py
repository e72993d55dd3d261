"""What the processes of `test_stale_code.py` do. Each function runs in a child and returns JSON."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from watching import watching

import orbax_aot as oaot

NAMES = ("live_model", "live_helper")


def load_model(folder):
    """Imports the user's modules from a folder, in place of those of another folder."""
    for name in NAMES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("live_model")
    finally:
        sys.path.remove(str(folder))


def write_model(folder, model, helper):
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "live_model.py").write_text(model)
    (folder / "live_helper.py").write_text(helper)
    return folder


def call(step):
    state, metrics = step({"w": jnp.arange(4.0)}, np.float32(2.0))
    return [np.asarray(state["w"]).tolist(), float(metrics["loss"])]


def save(path, folder, assign=None):
    """Traces and runs the model's step, then sets a global of the model, if asked, then saves."""
    model = load_model(folder)
    step = oaot.jit(model.train_step, donate_argnums=0)
    result = call(step)
    for name, value in (assign or {}).items():
        setattr(model, name, value)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"w": jnp.arange(4.0)}, fns={"train_step": step}))
        mngr.wait_until_finished()
    return result


def restore(path, folder, verify="code"):
    """Restores with a model's step, runs it, and runs the step by jax.jit alone for comparison."""
    import jax

    model = load_model(folder)
    step = oaot.jit(model.train_step, donate_argnums=0)
    with watching() as watched:
        with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
            args = oaot.AotRestore(fns={"train_step": step}, verify=verify)
            _, fns = mngr.restore(1, args=args)
        before = fns.report["train_step"].verdict.name
        result = call(step)
    report = fns.report["train_step"]
    # Only now: what jit has traced before a fingerprint was taken could be another program than the code says.
    right = call(jax.jit(model.train_step))
    return {
        "before": before,
        "verdict": report.verdict.name,
        "codes": [r.code.name for r in report.reasons],
        "checked_by": report.checked_by,
        "result": result,
        "right": right,
        "lines": watched.lines(),
        "traces": watched.work("train_step").count("/jax/core/compile/jaxpr_trace_duration"),
        "compiles": watched.work("train_step").count("/jax/core/compile/backend_compile_duration"),
    }

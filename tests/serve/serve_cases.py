"""What a process without the source does: restores functions by name and calls them on plain dictionaries."""

from __future__ import annotations

import no_source  # noqa: F401  # before anything else, so that nothing of the models is imported

# isort: split
import importlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from serve_inputs import MORE, features, mesh_of, tokens
from watching import WORK_EVENTS, watching

import orbax_aot as oaot


def restore(path, step=None, **options):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        step = mngr.latest_step() if step is None else step
        return mngr.restore(step, args=oaot.AotRestore(**options))


def about(report):
    return {
        "verdict": report.verdict.name,
        "codes": [r.code.name for r in report.reasons],
        "reasons": [str(r) for r in report.reasons],
    }


def where(array):
    """The spec, the mesh and the devices of an array, as JSON data."""
    sharding = array.sharding
    devices = sorted(d.id for d in sharding.device_set)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return {"devices": devices}
    spec = [list(e) if isinstance(e, tuple) else e for e in sharding.spec]
    return {"spec": spec, "mesh": dict(sharding.mesh.shape), "devices": devices}


def serve(path, model, shape=None, order=None):
    """Serves a model on a mesh (None: say nothing): its predictions, ten more steps, and where all of it lies."""
    mesh = None if shape is None else mesh_of(shape, order=order)
    batch = tokens if model == "language" else features
    spread = mesh if mesh is not None and mesh.size > 1 else None
    with watching() as watched:
        state, fns = restore(path, **({} if mesh is None else {"mesh": mesh}))
        params = state["params"] if model == "language" else state
        result = fns["predict"](params, batch(99, spread))
        logits = result["logits"] if model == "mlp" else result
        found = {
            "predict": about(fns.report["predict"]),
            "logits": np.asarray(logits).tolist(),
            "logits_at": where(logits),
            "params_at": places(params),
        }
        if model == "mlp":
            found["hidden_at"] = where(result["hidden"])
        if "train_step" in fns:
            found["losses"] = []
            for number in range(3, 3 + MORE):
                state, metrics = fns.train_step(state, batch(number, spread))
                loss = metrics["loss"] if model == "language" else metrics
                found["losses"].append(float(loss))
            found["trained_at"] = places(state["params"] if model == "language" else state)
            found["train_step"] = about(fns.report["train_step"])
    found["tracebacks"] = watched.tracebacks()
    found["worked_on"] = sorted(
        {e[1].get("fun_name", "") for e in watched.events if e[0] in WORK_EVENTS}
    )
    return found


def places(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): where(x) for p, x in flat}


def try_to_import(module):
    importlib.import_module(module)

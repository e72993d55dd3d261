"""What a process without the source does: restores functions by name and calls them on plain dictionaries."""

from __future__ import annotations

import no_source  # noqa: F401  # before anything else, so that nothing of the models is imported

# isort: split
import importlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from serve_inputs import AXES, MORE, bits, features, mesh_of, tokens
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


def call_each(path, shape, names=None, axes=None, step=1):
    """Restores functions of one state array `w`, calls each, and tells results or refusals, and the array itself."""
    mesh = mesh_of(shape, axes=axes or AXES)
    with watching() as watched:
        state, fns = restore(path, step, mesh=mesh, fns=names)
        found = {"w": bits(state["w"]), "w_at": where(state["w"]), "functions": {}}
        for name in fns:
            told = found["functions"][name] = about(fns.report[name])
            try:
                told["result"] = bits(fns[name](state["w"]))
            except Exception as e:
                told["error"] = f"{type(e).__name__}: {e}"
    return {**found, "tracebacks": watched.tracebacks(), "lines": watched.lines()}


def restore_or_raise(path, shape):
    """Restores with on_mismatch="raise"; returns the message."""
    try:
        restore(path, 1, mesh=mesh_of(shape), on_mismatch="raise")
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def call_explicit(path, shape, types):
    kinds = (getattr(jax.sharding.AxisType, types),) * 2
    mesh = jax.sharding.Mesh(mesh_of(shape).devices, AXES, axis_types=kinds)
    state, fns = restore(path, mesh=mesh)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    spec = jax.sharding.PartitionSpec("data", "model")
    result = fns.f(state, jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))
    return {**about(fns.report["f"]), "result": np.asarray(result).tolist(), "at": where(result)}


def serve_and_save(path, shape, save_steps=(), order=None, keep=None):
    """Restores the latest step of the MLP on a mesh, runs both functions, saves them with the next steps."""
    mesh = mesh_of(shape, order=order)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep)
    with (
        ocp.CheckpointManager(path, options=options, item_handlers=oaot.AotHandler()) as mngr,
        watching() as watched,
    ):
        state, fns = mngr.restore(mngr.latest_step(), args=oaot.AotRestore(mesh=mesh))
        spread = mesh if mesh.size > 1 else None
        _, loss = fns.train_step(state, features(3, spread))
        found = {
            "predict": about(fns.report["predict"]),
            "train_step": about(fns.report["train_step"]),
            "logits": bits(fns["predict"](state, features(99, spread))["logits"]),
            "loss": float(loss),
        }
        for step, names in save_steps:
            given = None if names is None else {name: fns[name] for name in names}
            mngr.save(step, args=oaot.AotSave(state, fns=given))
            mngr.wait_until_finished()
        found["steps"] = list(mngr.all_steps())
    return {**found, "tracebacks": watched.tracebacks()}


def place_state(path, shape=None, names=None, by="mesh"):
    """Restores a state with no target; tells where each array lies."""
    options = {}
    if shape is not None:
        mesh = mesh_of(shape)
        options = {"mesh": mesh} if by == "mesh" else {"devices": list(mesh.devices.flat)}
    with watching() as watched:
        state, fns = restore(path, fns=names, **options)
        found = {name: fns.report[name].verdict.name for name in fns}
    return {"at": places(state), "functions": found, "tracebacks": watched.tracebacks()}


def read_mixed(path, shape=None):
    """Restores a state of many kinds of leaves; tells what they are, and what the function makes of them."""
    state, fns = restore(path, **({} if shape is None else {"mesh": mesh_of(shape)}))
    kinds = {name: type(leaf).__name__ for name, leaf in state.items()}
    result = fns.f(state["w"], state["key"])
    b, (s, nine) = state["list"]
    return {
        "kinds": kinds,
        "plain": [state["int"], state["float"], state["none"], int(nine), int(s)],
        "numpy": state["numpy"].tolist(),
        "key": [str(jax.random.key_impl(state["key"])), jax.random.key_data(state["key"]).tolist()],
        "weak": [bool(state["weak"].aval.weak_type), float(state["weak"])],
        "noisy": np.asarray(result).tolist(),
        "verdict": fns.report["f"].verdict.name,
        "at": {"w": where(state["w"]), "key": where(state["key"]), "b": where(b)},
    }

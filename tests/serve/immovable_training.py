"""Programs that cannot be moved, and some that can, saved from a (2, 4) mesh; with their source."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from serve_inputs import bits, mesh_of

import orbax_aot as oaot


def save_all(path):
    """Saves one function of each kind with a state of arrays; returns their bits and what the functions gave."""
    mesh = mesh_of((2, 4))
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    rng = np.random.default_rng(0)
    w = jax.device_put(rng.normal(size=(8, 12)).astype(np.float32), on("data", "model"))

    def inside(x):
        return x - jax.lax.pmean(x, "model")

    spec = P("data", "model")
    fns = {
        "double": oaot.jit(lambda w: 2 * w, out_shardings=on("data", "model")),
        "per_device": oaot.jit(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)),
        "calls_back": oaot.jit(
            lambda w: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
        ),
    }
    results = {name: bits(fn(w)) for name, fn in fns.items()}
    bare = {name: fn.executables[0].compiled for name, fn in fns.items() if name == "double"}
    again, last = oaot.jit(lambda w: 2 * w), oaot.jit(lambda w: 2 * w)
    again(w), last(w)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"w": w}, fns=fns))
        mngr.save(2, args=oaot.AotSave({"w": w}, fns=bare))
        mngr.save(3, args=oaot.AotSave({"w": w}, fns={"double": again}, portable=("tpu",)))
        mngr.save(4, args=oaot.AotSave({"w": w}, fns={"double": last}, portable=False))
        mngr.wait_until_finished()
    return {"w": bits(w), **results}


def save_explicit(path):
    """Saves a function over a mesh of explicit axes; returns its result."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4),
        ("data", "model"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    x = jax.device_put(
        np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(mesh, P("data", "model"))
    )
    b = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("model")))
    state = {"b": b}
    function = oaot.jit(lambda state, x: jnp.tanh(0.01 * x) + state["b"])
    result = function(state, x)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns={"f": function}))
        mngr.wait_until_finished()
    return np.asarray(result).tolist()

"""States of several kinds, saved from a (2, 4) mesh with functions that take them; with the source."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from serve_inputs import mesh_of

import orbax_aot as oaot


def save_all(root):
    """Saves each state below `root`."""
    mesh = mesh_of((2, 4))
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    w = jax.device_put(np.arange(128, dtype=np.float32).reshape(8, 16), on("data", "model"))
    b = jax.device_put(np.arange(16, dtype=np.float32), on("model"))
    s = jax.device_put(np.int32(3), on())
    full = oaot.jit(lambda state: state["w"] * state["b"] + state["s"])
    full({"w": w, "b": b, "s": s})
    save(f"{root}/whole", {"w": w, "b": b, "s": s}, {"f": full})

    # The program wants `w` otherwise than it lies in the state that is saved.
    moved = oaot.jit(lambda params, x: x @ params["w"] + params["b"])
    elsewhere = {"w": jax.device_put(w, on(None, "model")), "b": b}
    moved(elsewhere, jax.device_put(np.ones((4, 8), np.float32), on("data")))
    save(f"{root}/part", {"params": {"w": w, "b": b}, "step": s, "rest": w}, {"f": moved})

    # No function takes this array; its sizes divide by 4 but not by 8.
    odd = jax.device_put(np.ones((2, 12), np.float32), on("data", "model"))
    save(f"{root}/unused", {"w": w, "b": b, "s": s, "odd": odd}, {"f": full})

    mixed = {
        "w": w,
        "numpy": np.arange(3.0),
        "int": 5,
        "float": 0.25,
        "key": jax.device_put(jax.random.key(7), on()),
        "weak": jax.device_put(jnp.asarray(2.5), on()),
        "none": None,
        "list": [b, (s, np.int64(9))],
    }
    noisy = oaot.jit(
        lambda w, key: w + jax.random.normal(key, w.shape), out_shardings=on("data", "model")
    )
    expected = noisy(w, mixed["key"])
    save(f"{root}/mixed", mixed, {"f": noisy})
    kind = str(jax.random.key_impl(mixed["key"]))
    return {"noisy": np.asarray(expected).tolist(), "key": [kind, [0, 7]]}


def save(path, state, fns):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()

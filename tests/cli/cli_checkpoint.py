"""What the checkpoint of these tests holds."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import orbax_aot as oaot

AXES = ("data", "model")


def make_mesh(shape: tuple[int, int] = (2, 4)) -> jax.sharding.Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=devices)


def train_step(state, batch):
    def loss(params):
        return ((jnp.tanh(batch @ params["w"]) - 1.0) ** 2).sum()

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
    return {"params": params, "step": state["step"] + 1}, value


def double(x):
    return x * 2


def calls_back(x):
    return jax.pure_callback(lambda y: np.asarray(y) + 1, jax.ShapeDtypeStruct((3,), x.dtype), x)


def arguments(mesh: jax.sharding.Mesh):
    """Returns state and batch of `train_step` on a mesh."""
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    w = np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)
    state = {"params": {"w": put(w, None, "model")}, "step": put(np.int32(0))}
    return state, put(np.linspace(0, 1, 8 * 16, dtype=np.float32).reshape(8, 16), "data", None)


def functions():
    """Returns the functions, compiled."""
    fns = {f.__name__: oaot.jit(f) for f in (train_step, double, calls_back)}
    fns["train_step"].compile(*arguments(make_mesh()))
    for name in ("double", "calls_back"):
        fns[name].compile(np.ones(3, np.float32))
    return fns


def save(root: pathlib.Path) -> pathlib.Path:
    """Saves steps 1 and 2; returns the root."""
    state, _ = arguments(make_mesh())
    fns = functions()
    with ocp.CheckpointManager(root, item_handlers=oaot.AotHandler()) as manager:
        for step in (1, 2):
            manager.save(step, args=oaot.AotSave(state, fns=fns, portable=("cpu", "tpu", "cuda")))
        manager.wait_until_finished()
    return root

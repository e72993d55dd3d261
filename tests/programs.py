"""Small programs that the tests save and restore; imported by the processes that save and by those that restore."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_aot as oaot

AXES = ("data", "model")
RATE = 0.05


def mesh_of(ids, shape=(2, 2), axes=AXES):
    """A mesh of the devices with these positions in `jax.devices()`, row-major."""
    devices = jax.devices()
    return Mesh(np.array([devices[i] for i in ids]).reshape(shape), axes[: len(shape)])


def sharded(mesh, *spec):
    names = [n if n is None or n in mesh.axis_names else None for n in spec]
    return NamedSharding(mesh, PartitionSpec(*names))


def state_shardings(mesh):
    weights = {"w1": sharded(mesh, None, "model"), "w2": sharded(mesh, "model", None)}
    return {"params": weights, "momentum": dict(weights), "step": sharded(mesh)}


def make_state(mesh):
    rng = np.random.default_rng(0)
    weights = lambda: {
        "w1": rng.normal(size=(8, 16)).astype(np.float32),
        "w2": rng.normal(size=(16, 8)).astype(np.float32),
    }
    momentum = jax.tree.map(np.zeros_like, weights())
    state = {"params": weights(), "momentum": momentum, "step": np.int32(0)}
    return jax.device_put(state, state_shardings(mesh))


def abstract(tree):
    """The target of a restore: shapes, types and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def make_batch(number, mesh=None):
    rng = np.random.default_rng(1000 + number)
    batch = rng.normal(size=(16, 8)).astype(np.float32)
    return batch if mesh is None else jax.device_put(batch, sharded(mesh, "data", None))


def predict(params, batch):
    return jnp.tanh(batch @ params["w1"]) @ params["w2"]


def loss_of(params, batch):
    return jnp.mean((predict(params, batch) - batch) ** 2)


def train_step(state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - RATE * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, {"loss": loss}


def jitted():
    """The functions of this module, jitted; new ones, with no memory of other cases in the process."""
    return {"train_step": oaot.jit(train_step, donate_argnums=0), "predict": oaot.jit(predict)}


def train(step, state, numbers, mesh):
    """Runs a step on numbered batches; returns the last state and the losses, bit by bit."""
    losses = []
    for number in numbers:
        state, metrics = step(state, make_batch(number, mesh))
        losses.append(float(metrics["loss"]).hex())
    return state, losses


def digest(tree):
    """A digest of the paths, types and bits of a tree of arrays."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        value = np.asarray(leaf)
        found.update(jax.tree_util.keystr(path, simple=True, separator="/").encode())
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()

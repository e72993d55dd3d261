"""A small checkpoint with two functions, for tests in one process."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import orbax_aot as oaot

STATE = {"a": jnp.ones(3)}


def double(x):
    return x * 2


def add(tree, y):
    return {"x": tree["x"] + y}


def live():
    return {"double": oaot.jit(double), "add": oaot.jit(add)}


def save(path):
    fns = live()
    fns["double"](STATE["a"])
    fns["add"]({"x": STATE["a"]}, np.float32(1))
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(STATE, fns=fns))
    return path


def restore(path, **args):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        return mngr.restore(1, args=oaot.AotRestore(**args))

"""Restores a program that calls Python with live functions whose callbacks differ from the saved ones.

    callbacks_child.py save|restore FOLDER

Each of these would end the process if it were run with the wrong callbacks.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from etils import epath
from support_case import array

import orbax_aot as oaot

X = array(4)
SHAPE = jax.ShapeDtypeStruct((4,), np.float32)


def call(fun, x, shape=SHAPE):
    return jax.pure_callback(lambda v: fun(np.asarray(v)), shape, x)


def saved(x):
    return call(lambda v: v + 100, call(lambda v: v * 2, x)), x


def other_bodies(x):
    return call(lambda v: v - 7, call(lambda v: v * 3, x)), x


def fewer(x):
    return call(lambda v: v + 100, x), x


def more(x):
    return call(lambda v: v + 1, call(lambda v: v + 100, call(lambda v: v * 2, x))), x


def none_at_all(x):
    return x * 2 + 100, x


def larger_between(x):
    big = call(lambda v: np.resize(v, 4096), x, jax.ShapeDtypeStruct((4096,), np.float32))
    return call(lambda v: v[:4] + 100, big), x


def other_type_between(x):
    wide = call(lambda v: v.astype(np.int32), x, jax.ShapeDtypeStruct((4,), np.int32))
    return call(lambda v: (v * 2 + 100).astype(np.float32), wide), x


LIVE = (saved, other_bodies, fewer, more, none_at_all, larger_between, other_type_between)


def save(folder: epath.Path) -> None:
    f = oaot.jit(saved)
    jax.block_until_ready(f(X))
    folder.mkdir(parents=True)
    compiled = jax.jit(saved).lower(X).compile()
    oaot.AotHandler().save(folder, oaot.AotSave(fns={"f": f, "bare": compiled}))


def restore(folder: epath.Path) -> None:
    found = {}
    for name in ("f", "bare"):
        for verify in ("code", "program", "signature"):
            for fun in LIVE:
                f = oaot.jit(fun)
                args = oaot.AotRestore(fns={name: f}, verify=verify)
                fns = oaot.AotHandler().restore(folder, args).fns
                right = np.array_equal(jax.block_until_ready(f(X))[0], jax.jit(fun)(X)[0])
                report = fns.report[name]
                found[f"{name} {verify} {fun.__name__}"] = [right, report.verdict.name]
    print(json.dumps(found))


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](epath.Path(sys.argv[2]))

"""What the tests of flags and custom calls run in processes of their own: `flags_child.py TASK FOLDER`."""

from __future__ import annotations

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from etils import epath
from jaxlib import lapack
from support_case import array

import orbax_aot as oaot

TARGET = "orbax_aot_test_qr"


def multiply(x):
    return x @ x + 1


def factor(x):
    shapes = (jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((4,), np.float32))
    call = jax.ffi.ffi_call(
        TARGET,
        shapes,
        input_layouts=[(0, 1)],
        output_layouts=[(0, 1), (0,)],
        input_output_aliases={0: 0},
    )
    return call(x)


def register() -> None:
    """Registers a kernel of jaxlib's under a name of our own, as a user's library would."""
    lapack._lapack.initialize()
    targets = lapack.registrations()["cpu"]
    (capsule,) = [target for name, target, *_ in targets if name == "lapack_sgeqrf_ffi"]
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")


def functions() -> dict[str, oaot.AotFunction]:
    return {"multiply": oaot.jit(multiply), "factor": oaot.jit(factor)}


def save(folder: epath.Path) -> None:
    register()
    fns = functions()
    for fn in fns.values():
        jax.block_until_ready(fn(array(4, 4)))
    folder.mkdir(parents=True)
    oaot.AotHandler().save(folder, oaot.AotSave(fns=fns))


def restore(folder: epath.Path, *, registered: bool, live: bool) -> None:
    if registered:
        register()
    fns = functions() if live else None
    restored = oaot.AotHandler().restore(folder, oaot.AotRestore(fns=fns)).fns
    found = {}
    for name, fn in restored.items():
        try:
            outputs = jax.tree.leaves(jax.block_until_ready(fn(array(4, 4))))
            found[name] = [np.asarray(x).tolist() for x in outputs]
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    print(json.dumps({"found": found, "report": restored.report.to_dict()}))


TASKS = {
    "save": save,
    "restore": lambda folder: restore(folder, registered=True, live=False),
    "unregistered": lambda folder: restore(folder, registered=False, live=False),
    "unregistered_live": lambda folder: restore(folder, registered=False, live=True),
}

if __name__ == "__main__":
    TASKS[sys.argv[1]](epath.Path(sys.argv[2]))

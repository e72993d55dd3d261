"""A JAX that has lost one of the private things this package uses: each entry of `orbax_aot/_jax` in turn."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import tempfile
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import orbax_aot as oaot
import orbax_aot._jax
from orbax_aot import store

for _module in pkgutil.iter_modules(orbax_aot._jax.__path__):
    importlib.import_module(f"orbax_aot._jax.{_module.name}")


def entries():
    """Names of all public functions of the private door, as `module.function`."""
    return [
        f"{info.name}.{name}"
        for info in pkgutil.iter_modules(orbax_aot._jax.__path__)
        for name, value in vars(sys.modules[f"orbax_aot._jax.{info.name}"]).items()
        if inspect.isfunction(value)
        and value.__module__ == f"orbax_aot._jax.{info.name}"
        and not name.startswith("_")
    ]


class Lost:
    """While entered, an entry raises what a missing private name of JAX raises, wherever it has been imported to."""

    def __init__(self, entry):
        module, _, name = entry.partition(".")
        self.original = getattr(sys.modules[f"orbax_aot._jax.{module}"], name)
        self.calls = 0

        def lost(*args, **kwargs):
            _note()  # noqa: F821
            raise AttributeError(f"jax._src has no {_name}")  # noqa: F821

        def note():
            self.calls += 1

        # It raises in its own module, as the entry would.
        home = {"__name__": f"orbax_aot._jax.{module}", "__builtins__": __builtins__}
        self.lost = types.FunctionType(lost.__code__, {**home, "_note": note, "_name": name})

    def _replace(self, old, new):
        for key, module in list(sys.modules.items()):
            if key.startswith("orbax_aot"):
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)

    def __enter__(self):
        self._replace(self.original, self.lost)
        return self

    def __exit__(self, *_):
        self._replace(self.lost, self.original)


def double(state):
    return {"x": state["x"] * 2}


def save_whole():
    """Saves with nothing lost; returns the folder."""
    folder = tempfile.mkdtemp()
    step = oaot.jit(double)
    step({"x": jnp.arange(4.0)})
    with ocp.CheckpointManager(folder, item_handlers=oaot.AotHandler()) as manager:
        manager.save(1, args=oaot.AotSave({"x": jnp.arange(4.0)}, fns={"step": step}))
    return folder


def without(entry, whole, folder):
    """Saves, restores and calls without one entry; returns what became of it."""
    found = {"trouble": [], "verdict": None, "reasons": []}

    def attempt(what, function):
        try:
            return function()
        except Exception as e:
            found["trouble"].append(f"{what}: {type(e).__name__}: {e}")
            found.setdefault("traceback", traceback.format_exc()[-1500:])

    with Lost(entry) as lost:
        found["called"] = attempt("call", lambda: call_fresh())
        attempt("save", lambda: save(folder))
        found["saved weights"] = attempt("read what was saved", lambda: read_plainly(folder))
        attempt("restore", lambda: restore(whole, found))
    found["used"] = lost.calls > 0
    absent = store.Store(f"{folder}/1/default").read_manifest().body.functions["step"].absent
    found["absent"] = None if absent is None else f"{absent.code}: {absent.detail}"
    return found


def call_fresh():
    return np.asarray(oaot.jit(double)({"x": jnp.arange(4.0)})["x"]).tolist()


def save(folder):
    step = oaot.jit(double)
    state = {"x": jnp.arange(4.0)}
    with contextlib.suppress(Exception):  # told by "call"
        step(state)
    with ocp.CheckpointManager(folder, item_handlers=oaot.AotHandler()) as manager:
        manager.save(1, args=oaot.AotSave(state, fns={"step": step}))


def read_plainly(folder):
    with ocp.CheckpointManager(folder) as manager:
        return np.asarray(manager.restore(1, args=ocp.args.StandardRestore())["x"]).tolist()


def restore(folder, found):
    live = oaot.jit(double)
    target = {"x": jax.ShapeDtypeStruct((4,), jnp.float32)}
    with ocp.CheckpointManager(folder, item_handlers=oaot.AotHandler()) as manager:
        state, fns = manager.restore(1, args=oaot.AotRestore(target, fns={"step": live}))
        found["weights"] = np.asarray(state["x"]).tolist()
        found["result"] = np.asarray(fns.step(state)["x"]).tolist()
        report = fns.report["step"]
    found["verdict"] = report.verdict.name
    found["reasons"] = [str(r) for r in report.reasons]

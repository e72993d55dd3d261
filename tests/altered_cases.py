"""What the processes of `test_altered_manifest.py` do."""

from __future__ import annotations

import shutil
from pathlib import Path

import altering
import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
from watching import watching

import orbax_aot as oaot


def manager(path):
    return ocp.CheckpointManager(path, item_handlers=oaot.AotHandler())


def save(path):
    mesh = programs.mesh_of([0, 1, 2, 3])
    fns = programs.jitted()
    state = programs.make_state(mesh)
    fns["predict"](state["params"], programs.make_batch(0, mesh))
    fns["train_step"].compile(state, programs.make_batch(0, mesh))
    with manager(path) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))


def right_results(ids=(0, 1, 2, 3)):
    mesh = programs.mesh_of(ids)
    state = programs.make_state(mesh)
    logits = jax.jit(programs.predict)(state["params"], programs.make_batch(0, mesh))
    new, metrics = jax.jit(programs.train_step)(state, programs.make_batch(0, mesh))
    return {
        "state": programs.digest(state),
        "predict": programs.digest(logits),
        "train_step": programs.digest((new, metrics)),
    }


def restore(path, live=True):
    """Restores on devices 0-3 and calls both functions once."""
    mesh = programs.mesh_of([0, 1, 2, 3])
    fns = programs.jitted()
    target = programs.abstract(programs.make_state(mesh))
    found = {}
    with watching() as watched:
        with manager(path) as mngr:
            args = oaot.AotRestore(target, fns=fns if live else list(fns))
            state, restored = mngr.restore(1, args=args)
        found["state"] = programs.digest(state)
        for name, arguments in (("predict", (state["params"],)), ("train_step", (state,))):
            try:
                result = restored[name](*arguments, programs.make_batch(0, mesh))
                found[name] = programs.digest(result)
            except oaot.AotError as e:
                found[name] = f"{type(e).__name__}: {e}"
    found["report"] = {
        name: [r.verdict.name, [reason.code.name for reason in r.reasons]]
        for name, r in restored.report.items()
    }
    found["lines"] = watched.lines()
    found["tracebacks"] = watched.tracebacks()
    return found


# -- every part of a manifest, one after the other --------------------------------------------------------------------


def small(state, x, unused):
    return {"w": state["w"] * 2 + x}, (x.sum(), x > 0)


def small_arguments():
    mesh = programs.mesh_of([0, 1], (2,), ("data",))
    place = lambda x: jax.device_put(x, programs.sharded(mesh, "data"))
    state = {"w": place(np.arange(4, dtype=np.float32))}
    return state, place(np.linspace(-1, 1, 4, dtype=np.float32)), place(np.ones(4, np.int32))


def save_small(path):
    f = oaot.jit(small, donate_argnums=0)
    f.compile(*small_arguments())
    with manager(path) as mngr:
        state = small_arguments()[0]
        mngr.save(1, args=oaot.AotSave(state, fns={"small": f}, portable=False))


def small_parts(path):
    """The number of alterations that `run_altered` knows of this manifest."""
    body = altering.read_body(Path(path) / "1")
    return sum(len(altering.mutations(value)) for _, value in altering.leaves(body))


def run_altered(path, scratch, numbers):
    """Restores and calls the function under some of the alterations; returns those with a wrong result."""
    source, step = Path(path) / "1", Path(scratch) / "1"
    if not step.exists():
        shutil.copytree(path, scratch, dirs_exist_ok=True)
    body = altering.read_body(source)
    right = programs.digest(jax.jit(small)(*small_arguments()))
    all_cases = [
        (where, value, new)
        for where, value in altering.leaves(body)
        for new in altering.mutations(value)
    ]
    wrong = []
    for number in numbers:
        where, old, new = all_cases[number]
        what = f"{number}: {'.'.join(map(str, where))}: {old!r} -> {new!r}"
        print(what, flush=True)  # what killed the process stands last in its output
        altering.write_body(step, altering.replaced(body, where, new))
        for live in (True, False):
            try:
                f = oaot.jit(small, donate_argnums=0)
                target = programs.abstract(small_arguments()[0])
                args = oaot.AotRestore(target, fns={"small": f} if live else ["small"])
                with manager(scratch) as mngr:
                    state, fns = mngr.restore(1, args=args)
                if programs.digest(state) != programs.digest(small_arguments()[0]):
                    wrong.append(f"{what}: the state differs")
                result = programs.digest(fns.small(*small_arguments()))
                if result != right:
                    wrong.append(f"{what}: live={live}, {fns.report['small']}: the result differs")
            except oaot.AotError as e:
                if live:
                    wrong.append(f"{what}: {type(e).__name__}: {e}")
            except Exception as e:
                wrong.append(f"{what}: live={live}, {type(e).__name__}: {e}")
    return wrong

"""What the processes of `test_restart.py` do. Each function runs in a child and returns JSON."""

from __future__ import annotations

import logging

import orbax.checkpoint as ocp
import programs
from watching import watching

import orbax_aot as oaot


def manager(path, **handler):
    return ocp.CheckpointManager(path, item_handlers=oaot.AotHandler(**handler))


def about(fns, watched=None):
    """The report of a restore as JSON, with what was logged and how often JAX worked on the step."""
    found = {
        name: {
            "verdict": report.verdict.name,
            "codes": [r.code.name for r in report.reasons],
            "reasons": [str(r) for r in report.reasons],
            "checked_by": report.checked_by,
        }
        for name, report in fns.report.items()
    }
    if watched is not None:
        found["lines"] = watched.lines(logging.INFO)
        found["tracebacks"] = watched.tracebacks()
    return found


# -- the main job -----------------------------------------------------------------------------------------------------


def train_save_and_go_on(path, ids, more):
    """Trains 3 steps on a (2,2) mesh, saves, and goes on without interruption."""
    mesh = programs.mesh_of(ids)
    fns = programs.jitted()
    state, _ = programs.train(fns["train_step"], programs.make_state(mesh), range(3), mesh)
    logits = fns["predict"](state["params"], programs.make_batch(99, mesh))
    with manager(path) as mngr:
        mngr.save(3, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()
    saved = programs.digest(state)
    state, losses = programs.train(fns["train_step"], state, range(3, 3 + more), mesh)
    return {
        "saved": saved,
        "logits": programs.digest(logits),
        "losses": losses,
        "last": programs.digest(state),
    }


def resume(path, ids, more=4, shape=(2, 2), by="mesh", live=True, verify="code"):
    """Restores by `mesh=`, `devices=`, the shardings of a target, or nothing ("default"), and trains on.

    `by` may join two with a plus sign.
    """
    mesh = programs.mesh_of(ids, shape)
    choices = {
        "mesh": {"mesh": mesh},
        "devices": {"devices": tuple(mesh.devices.flat)},
        "target": {"item": programs.abstract(programs.make_state(mesh))},
        "default": {},
    }
    asked = {k: v for choice in by.split("+") for k, v in choices[choice].items()}
    fns = programs.jitted() if live else None
    with watching() as watched:
        with manager(path) as mngr:
            args = oaot.AotRestore(fns=fns, verify=verify, **asked)
            state, restored = mngr.restore(mngr.latest_step(), args=args)
        saved = programs.digest(state)
        placed = state["params"]["w1"].sharding.is_equivalent_to(
            programs.state_shardings(mesh)["params"]["w1"], 2
        )
        logits = restored.predict(state["params"], programs.make_batch(99, mesh))
        numbers = range(3, 3 + more)
        state, losses = programs.train(restored.train_step, state, numbers, mesh)
    return {
        **about(restored, watched),
        "work": [*watched.work("train_step"), *watched.work("predict")],
        "events": sorted({name for name, _ in watched.named("/jax/orbax_aot/restore/")}),
        "saved": saved,
        "placed": placed,
        "logits": programs.digest(logits),
        "losses": losses,
        "last": programs.digest(state),
    }


def resume_all(path, cases):
    """Runs several cases of `resume` in one process."""
    return [resume(path, **case) for case in cases]

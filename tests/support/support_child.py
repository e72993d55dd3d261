"""Saves or restores the cases of the support matrix; run as a script, in a process of its own.

    support_child.py save|saved|live FOLDER RESULTS < ids, one a line

Writes a JSON line to RESULTS before and after each case, so that whoever started it knows where it died.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from etils import epath
from support_case import Case, Program, Unavailable, encode
from support_cases import CASES

import orbax_aot as oaot
from orbax_aot import store

_EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compiles",
    "/jax/core/compile/jaxpr_trace_duration": "traces",
}
counts = dict.fromkeys(_EVENTS.values(), 0)


def _count(event: str, secs: float, *, fun_name: str = "", **_: Any) -> None:
    if event in _EVENTS and fun_name != "probe":  # which a fingerprint traces, once in a process
        counts[_EVENTS[event]] += 1


def save(case: Case, folder: epath.Path) -> dict[str, Any]:
    program = case.make(jax.devices()[: case.devices])
    with program.context():
        outputs = encode(jax.block_until_ready(program.run(program.functions)))
    folder.mkdir(parents=True)
    oaot.AotHandler().save(folder, oaot.AotSave(fns=program.functions))
    functions = store.Store(folder).read_manifest().functions
    absent = {n: [f.absent.code, f.absent.detail] for n, f in functions.items() if f.absent}
    return {"outputs": outputs, "absent": absent}


def restore(case: Case, folder: epath.Path, *, live: bool) -> dict[str, Any]:
    """Restores on the saved devices, then on others, in the opposite order; the files' own names say which."""
    found = {"same": _restore_on(case, folder, jax.devices()[: case.devices], None, live)}
    if case.remap:
        others = jax.devices()[::-1][: case.devices]
        if case.devices == 1:
            with jax.default_device(others[0]):
                found["other"] = _restore_on(case, folder, others, None, live)
        else:
            found["other"] = _restore_on(case, folder, others, others, live)
    return found


def _restore_on(
    case: Case, folder: epath.Path, devices: Any, asked: Any, live: bool
) -> dict[str, Any]:
    program = case.make(devices)
    jax.effects_barrier()
    counts.update(dict.fromkeys(counts, 0))
    fns: Any = list(program.functions)
    if live:  # what is compiled already has no live function
        given = program.functions.items()
        fns = {name: f if isinstance(f, oaot.AotFunction) else None for name, f in given}
    place = {"mesh": program.mesh} if asked and program.mesh is not None else {"devices": asked}
    restored = oaot.AotHandler().restore(folder, oaot.AotRestore(fns=fns, **place))
    found: dict[str, Any] = {}
    try:
        found["outputs"] = _run(program, restored.fns)
    except Exception as e:
        found["error"] = f"{type(e).__name__}: {e}"
        found["traceback"] = traceback.format_exc()
    found["counts"] = dict(counts)
    found["report"] = restored.fns.report.to_dict()
    return found


def _run(program: Program, fns: Any) -> list[Any]:
    with program.context():
        outputs = jax.block_until_ready(program.run(fns))
    return encode(outputs)


def main(how: str, folder: str, results: str) -> None:
    jax.monitoring.register_event_duration_secs_listener(_count)
    cases = {case.id: case for case in CASES}
    folders = {case.id: epath.Path(folder) / str(i) for i, case in enumerate(CASES)}
    with open(results, "a") as out:

        def write(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        for id in sys.stdin.read().splitlines():
            write(case=id, state="begun")
            if id == os.environ.get("ORBAX_AOT_SUPPORT_ABORT"):  # shows that a death is noticed
                os.abort()
            start = time.perf_counter()
            try:
                if how == "save":
                    found = save(cases[id], folders[id])
                else:
                    found = restore(cases[id], folders[id], live=how == "live")
            except Unavailable as e:
                found = {"unavailable": str(e)}
            except Exception as e:
                found = {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
            write(case=id, state="done", secs=time.perf_counter() - start, **found)
    sys.stdout.flush()
    os._exit(0)  # what a case left running must not decide the exit code


if __name__ == "__main__":
    main(*sys.argv[1:])

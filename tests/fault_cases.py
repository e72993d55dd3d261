"""What the process of `test_faults.py` does: makes each of our functions fail in turn, at each call it gets."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import orbax_aot as oaot
import programs

MESH_IDS = (0, 1)

# What Orbax itself calls; these hand over to the wrapped handler, and their own part is in what they call.
_ENTRY_POINTS = {
    f"orbax_aot.handler.AotHandler.{name}"
    for name in ("__init__", "save", "async_save", "restore", "finalize", "close", "metadata")
}


class Injected(RuntimeError):
    pass


def _our_modules() -> list[Any]:
    import orbax_aot

    names = [m.name for m in pkgutil.walk_packages(orbax_aot.__path__, "orbax_aot.")]
    return [sys.modules[name] for name in names if name in sys.modules]


def _functions() -> Iterator[tuple[str, Any, str, Any]]:
    """All functions and methods of this package: (full name, the object they are set on, name, the raw attribute)."""
    for module in _our_modules():
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", module, name, value
            elif inspect.isclass(value):
                for method, raw in list(vars(value).items()):
                    function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
                    if isinstance(raw, property):
                        function = raw.fget
                    if inspect.isfunction(function) and function.__module__ == module.__name__:
                        yield f"{module.__name__}.{value.__qualname__}.{method}", value, method, raw


def _wrapped(raw: Any, before: Callable[[], None]) -> Any:
    """Returns an attribute like `raw` that calls `before` first."""

    def wrap(function: Any) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                before()
                return await function(*args, **kwargs)

            return coroutine

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            before()
            return function(*args, **kwargs)

        return plain

    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(wrap(raw.__func__))
    if isinstance(raw, property):
        return property(wrap(raw.fget), raw.fset, raw.fdel, raw.__doc__)
    return wrap(raw)


@contextlib.contextmanager
def patched(before: Callable[[str], None], only: str | None = None) -> Iterator[None]:
    """Calls `before(full name)` at each call of our functions, or of one of them, while the block runs."""
    undo = []
    try:
        for full, owner, name, raw in list(_functions()):
            if only is not None and full != only:
                continue
            replacement = _wrapped(raw, functools.partial(before, full))
            places = [(owner, name)]
            if inspect.ismodule(owner):  # also where another module imported it by name
                places += [
                    (m, n) for m in _our_modules() for n, v in list(vars(m).items()) if v is raw
                ]
            for place, at in dict.fromkeys((id(p), n) for p, n in places):
                target = next(p for p, n in places if id(p) == place and n == at)
                undo.append((target, at, raw))
                setattr(target, at, replacement)
        yield
    finally:
        for target, at, raw in reversed(undo):
            setattr(target, at, raw)


def _manager(path: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(path, item_handlers=oaot.AotHandler())


def _mesh() -> Any:
    return programs.mesh_of(MESH_IDS, (1, 2))


def _save(path: Any, state: Any, fns: Any) -> None:
    with _manager(path) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()


def _restore(path: Any, state: Any, how: str) -> tuple[Any, Any]:
    live = programs.jitted()
    args = {
        "live": lambda: oaot.AotRestore(programs.abstract(state), fns=live),
        "no source": lambda: oaot.AotRestore(mesh=_mesh()),
    }[how]()
    with _manager(path) as mngr:
        return mngr.restore(1, args=args)


def _trained_functions(state: Any) -> Any:
    fns = programs.jitted()
    fns["predict"](state["params"], programs.make_batch(0, _mesh()))
    fns["train_step"].compile(state, programs.make_batch(0, _mesh()))
    return fns


def _warm_up(path: Any) -> Any:
    """Imports all there is to import; returns the state that all cases use."""
    for module in ("orbax_aot.portable", "orbax_aot.program", "orbax_aot.fingerprint"):
        importlib.import_module(module)
    state = programs.make_state(_mesh())
    _save(path, state, _trained_functions(state))
    return state


def _is_weights_problem(path: Any, state: Any) -> str | None:
    """Restores with Orbax alone; returns what is wrong with the weights."""
    with ocp.CheckpointManager(path, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        if mngr.all_steps() != [1]:
            return f"committed steps: {mngr.all_steps()}"
        found = mngr.restore(1, args=ocp.args.StandardRestore(programs.abstract(state)))
    return None if programs.digest(found) == programs.digest(state) else "other weights"


def faults_of_save(scratch: str) -> dict[str, Any]:
    """Fails each function that a save calls, once for each; returns how many there are, and what was lost."""
    root = Path(scratch)
    state = _warm_up(root / "warm")
    called: set[str] = set()
    fns = _trained_functions(state)
    with patched(called.add):
        _save(root / "counted", state, fns)
    called -= _ENTRY_POINTS
    called = {name for name in called if not name.endswith("AotSave.__post_init__")}
    problems = []
    for name in sorted(called):
        fns = _trained_functions(state)
        hits = []

        def fail() -> None:
            hits.append(1)
            raise Injected(name)

        shutil.rmtree(root / "failed", ignore_errors=True)
        try:
            with patched(lambda _: fail(), only=name):
                _save(root / "failed", state, fns)
            problem = _is_weights_problem(root / "failed", state)
        except BaseException as e:
            problem = f"{type(e).__name__}: {e}"
        if not hits:
            problem = "was not called"
        if problem is None:
            try:  # what such a save left behind is restored by this package, too
                found, restored = _restore(root / "failed", state, "live")
                if programs.digest(found) != programs.digest(state):
                    problem = "this package restores other weights"
                restored.predict(found["params"], programs.make_batch(0, _mesh()))
            except BaseException as e:
                problem = f"restoring afterwards: {type(e).__name__}: {e}"
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return {"called": sorted(called), "problems": problems}


def faults_of_restore(scratch: str, how: str) -> dict[str, Any]:
    """Fails each function that a restore calls; returns how many there are, and what was lost.

    With live functions these are called afterwards, without any failure, and must work.
    """
    root = Path(scratch)
    state = _warm_up(root / "saved")
    batch = programs.make_batch(0, _mesh())
    right = programs.digest(jax.jit(programs.predict)(state["params"], batch))
    called: set[str] = set()
    with patched(called.add):
        _, fns = _restore(root / "saved", state, how)
        fns.report["predict"]
    called -= _ENTRY_POINTS
    # Arguments are checked when they are made, and the report is read by the caller: not part of the restore.
    aside = ("AotRestore.__post_init__", "require_devices", "_require_names", "jit", "is_device")
    called = {n for n in called if not n.endswith(aside) and ".report." not in n}
    problems = []
    for name in sorted(called):
        failed = threading.Event()

        def fail() -> None:
            failed.set()
            raise Injected(name)

        problem = None
        try:
            with patched(lambda _: fail(), only=name):
                live = {}
                if how == "live":
                    with contextlib.suppress(Injected):
                        live = programs.jitted()
                found, restored = _restore_with(root / "saved", state, how, live or None)
                for function in list(restored._restored.values()):
                    with contextlib.suppress(Injected):
                        function.wait()
            if programs.digest(found) != programs.digest(state):
                problem = "other weights"
            if how == "live":
                result = programs.digest(restored["predict"](found["params"], batch))
                if result != right:
                    problem = "predict is wrong"
        except BaseException as e:
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return {"called": sorted(called), "problems": problems}


def _restore_with(path: Any, state: Any, how: str, live: Any) -> tuple[Any, Any]:
    args = (
        oaot.AotRestore(programs.abstract(state), fns=live or programs.jitted())
        if how == "live"
        else oaot.AotRestore(mesh=_mesh())
    )
    with _manager(path) as mngr:
        return mngr.restore(1, args=args)

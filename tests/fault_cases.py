"""What the process of `test_faults.py` does: makes each of our functions fail in turn, at each call it gets."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import programs

import orbax_aot as oaot

MESH_IDS = (0, 1)

# Made to fail, these have nothing around them but Orbax or the caller. They hold nothing of ours: the first hand over
# to the wrapped handler, the second are a `try` around others, the third are what a caller does before the restore.
_HAND_OVER = """
handler.AotHandler.__init__ handler.AotHandler.save handler.AotHandler.async_save handler.AotHandler.restore
handler.AotHandler.finalize handler.AotHandler.close handler.AotHandler.metadata handler.AotHandler._typestr
restoring.has_state handler.AotHandler._wrapped_save handler.AotHandler._restore_state
"""
_GUARDS = """
handler.AotHandler._commit handler.AotHandler._write saving.take_snapshot saving.sign restoring.begin
restoring.Restoring.make_target restoring.Restoring.take_state restoring.Restoring.finish
restoring.NothingRestored.__init__ restored.RestoredFunctions.__init__
report.RestoreReport.__init__
"""
_CALLERS = """
handler.AotSave.__init__ handler.AotSave.__post_init__ handler.AotRestore.__init__ handler.AotRestore.__post_init__
saving.require_names saving.require_portable saving.require_savable functions.require_pure trust.Trust.__init__
trust.Trust.owner topology.require_devices _jax.devices.is_device
"""
NOT_OURS = frozenset(f"orbax_aot.{name}" for name in (_HAND_OVER + _GUARDS + _CALLERS).split())


class Injected(RuntimeError):
    pass


def _our_modules() -> list[Any]:
    import orbax_aot

    found = pkgutil.walk_packages(orbax_aot.__path__, "orbax_aot.")
    return [importlib.import_module(module.name) for module in found]


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


def _save(path: Any, state: Any, fns: Any, asynchronously: bool = True) -> None:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronously)
    with ocp.CheckpointManager(path, options=options, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()


def _called_functions(state: Any) -> Any:
    """One function, compiled anew: what a first save of it does is all still to be done."""
    fns = {"predict": programs.jitted()["predict"]}
    fns["predict"](state["params"], programs.make_batch(0, _mesh()))
    return fns


def _warm_up(path: Any) -> Any:
    """Saves once, so that what is done once in a process is done; returns the state that all cases use."""
    state = programs.make_state(_mesh())
    _save(path, state, _called_functions(state))
    return state


def _is_weights_problem(path: Any, state: Any) -> str | None:
    """Restores with Orbax alone; returns what is wrong with the weights."""
    with ocp.CheckpointManager(path, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        if mngr.all_steps() != [1]:
            return f"committed steps: {mngr.all_steps()}"
        found = mngr.restore(1, args=ocp.args.StandardRestore(programs.abstract(state)))
    return None if programs.digest(found) == programs.digest(state) else "other weights"


def _failing(hits: list[str] | None = None) -> Callable[[str], None]:
    """Returns what raises at each call, and notes it in `hits`."""

    def fail(name: str) -> None:
        if hits is not None:
            hits.append(name)
        raise Injected(name)

    return fail


def faults_of_save(scratch: str) -> dict[str, Any]:
    """Fails each function that a save calls, once for each; returns how many there are, and what was lost."""
    root = Path(scratch)
    state = _warm_up(root / "warm")
    called: set[str] = set()
    fns = _called_functions(state)
    with patched(called.add):
        _save(root / "counted", state, fns)
    called -= NOT_OURS
    problems = []
    for name in sorted(called):
        fns = _called_functions(state)
        hits: list[str] = []
        shutil.rmtree(root / "failed", ignore_errors=True)
        try:
            with patched(_failing(hits), only=name):
                _save(root / "failed", state, fns)
            problem = _is_weights_problem(root / "failed", state)
        except BaseException as e:
            problem = f"{type(e).__name__}: {e}"
        if not hits:
            problem = "was not called"
        if problem is None:
            try:  # what such a save left behind is restored by this package, too
                found, restored = _restore(root / "failed", state, programs.jitted())
                if programs.digest(found) != programs.digest(state):
                    problem = "this package restores other weights"
                str(restored.report)
            except BaseException as e:
                problem = f"restoring afterwards: {type(e).__name__}: {e}"
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return {"called": sorted(called), "problems": problems}


def faults_of_restore(scratch: str, how: str) -> dict[str, Any]:
    """Fails each function that a restore calls; returns how many there are, and what was lost.

    Live functions are called afterwards, without any failure, and must work.
    """
    root = Path(scratch)
    state = _warm_up(root / "saved")
    batch = programs.make_batch(0, _mesh())
    right = programs.digest(jax.jit(programs.predict)(state["params"], batch))
    called: set[str] = set()
    live = programs.jitted() if how == "live" else None
    with patched(called.add):
        _restore(root / "saved", state, live)
    called -= NOT_OURS
    problems = []
    for name in sorted(called):
        live = programs.jitted() if how == "live" else None
        problem = None
        try:
            with patched(_failing(), only=name):
                found, restored = _restore(root / "saved", state, live)
                _wait_for_loads(restored)
            if programs.digest(found) != programs.digest(state):
                problem = "other weights"
            for fns in (restored, live) if live else ():
                if programs.digest(fns["predict"](found["params"], batch)) != right:
                    problem = "predict is wrong"
            str(restored.report)
        except BaseException as e:
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return {"called": sorted(called), "problems": problems}


def _restore(path: Any, state: Any, live: Any) -> tuple[Any, Any]:
    """Restores on two devices: with live functions and a target, or with neither."""
    args = (
        oaot.AotRestore(mesh=_mesh())
        if live is None
        else oaot.AotRestore(programs.abstract(state), fns=live)
    )
    with _manager(path) as mngr:
        return mngr.restore(1, args=args)


def _wait_for_loads(restored: Any) -> None:
    """Lets what loads in the background end, while it still fails."""
    for function in restored._restored.values():
        for signature in function.signatures:
            if signature._loading is not None:
                signature._loading.exception()


def loses_the_step(scratch: str, name: str) -> bool:
    """Whether a failure in a function keeps a step from being committed."""
    state = programs.make_state(_mesh())
    try:
        with patched(_failing(), only=name):
            _save(scratch, state, {})
    except Exception:
        return True
    return _is_weights_problem(scratch, state) is not None

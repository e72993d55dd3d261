"""Saving the functions of a checkpoint: what is noted on the training thread, and what is written after it."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jaxlib.version
import msgspec
from absl import logging
from etils import epath

from orbax_aot import deadline
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import restored as restored_lib
from orbax_aot import state as state_lib
from orbax_aot import store as store_lib
from orbax_aot import trust as trust_lib
from orbax_aot.overrides import is_off
from orbax_aot.version import __version__


class SaveRequest(Protocol):
    """What the save arguments of either Orbax API say."""

    item: Any
    fns: Mapping[str, Any] | None
    portable: bool | Sequence[str]


_T = TypeVar("_T")
_MANIFEST_SECS = 10.0
_Executables = Callable[[], tuple[functions_lib.Executable, ...]]


_SAVABLE = (
    functions_lib.AotFunction,
    functions_lib.Executable,
    restored_lib.SavedFunction,
    jax.stages.Compiled,
)


def require_names(names: Sequence[Any], where: str) -> None:
    """Raises `TypeError` unless all are names a function can have."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{where}: function names are non-empty strings, got {name!r}.")
        try:
            name.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"{where}: the function name {name!r} is no valid Unicode.") from e


def require_savable(fns: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a copy of `AotSave(fns=...)`; raises `TypeError` where it holds what cannot be saved."""
    if fns is None:
        return None
    if not isinstance(fns, Mapping):
        raise TypeError(
            "AotSave(fns=...) takes a mapping from names to AotFunction (oaot.jit), Executable or "
            f"jax.stages.Compiled; got {type(fns).__name__}."
        )
    require_names(list(fns), "AotSave(fns=...)")
    for name, fn in fns.items():
        if not isinstance(fn, _SAVABLE):
            raise TypeError(
                f"AotSave(fns={{{name!r}: ...}}) takes an AotFunction (oaot.jit), an Executable or a "
                f"jax.stages.Compiled; got {type(fn).__name__}. Wrap a function by oaot.jit, once, and call "
                "what that returns."
            )
    return dict(fns)


def require_portable(portable: Any) -> bool | tuple[str, ...]:
    """Returns `AotSave(portable=...)`; raises `TypeError` where it is nothing that names platforms."""
    if isinstance(portable, bool):
        return portable
    if isinstance(portable, str) or not all(isinstance(p, str) for p in portable):
        raise TypeError(
            "AotSave(portable=...) is True, False or a sequence of platforms such as ('cpu', 'tpu'); "
            f"got {portable!r}."
        )
    return tuple(portable)


def about_functions(args: SaveRequest) -> dict[str, Any]:
    """Returns what the file `metadata` of an item of executables only says, which Orbax restores as JSON."""
    return {"orbax_aot": __version__, "functions": sorted(args.fns or {})}


def _snapshot_of(fn: Any, name: str) -> _Executables:
    """Notes what there is of a function now; asked later, off the training thread, since that can wait for loads."""
    if isinstance(fn, functions_lib.AotFunction):
        return fn.snapshot()
    if isinstance(fn, restored_lib.SavedFunction):
        return lambda: fn.executables
    if isinstance(fn, functions_lib.Executable):
        return lambda: (fn,)
    return lambda: (functions_lib.executable_of(fn, name),)


def executables_of(fn: Any, name: str) -> tuple[functions_lib.Executable, ...]:
    """Returns what there is of a function that `AotSave` takes; waits for loads under way."""
    return _snapshot_of(fn, name)()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What of a save was seen on the training thread: references only, no arrays."""

    functions: dict[str, _Executables] | None  # None: none are saved
    restored: tuple[restored_lib.RestoredFunction, ...]
    state: state_lib.Snapshot | None
    kind: str
    portable: bool | Sequence[str]


def take_snapshot(
    args: SaveRequest, restored: tuple[restored_lib.RestoredFunction, ...] = ()
) -> Snapshot | None:
    """Notes what is needed of a save's functions and state; None where there is nothing to do. Never raises.

    `restored` are the functions that have been restored, to be saved now or later.
    """
    try:
        if (args.fns is None and not restored) or is_off() or jax.process_index() != 0:
            return None
        functions = None
        if args.fns is not None:
            functions = {name: _snapshot_of(fn, name) for name, fn in args.fns.items()}
        return Snapshot(
            functions=functions,
            restored=restored,
            state=state_lib.take_snapshot(args.item),
            kind="functions" if args.item is None else "state",
            portable=args.portable,
        )
    except Exception:
        logging.exception("orbax_aot: no executables in this save; the state is saved.")
        return None


class Saving:
    """One save's executables: packed by a worker, written by the caller, within a time limit."""

    def __init__(self, snapshot: Snapshot, timeout_secs: float):
        self._snapshot = snapshot
        self._deadline = time.monotonic() + timeout_secs
        self._timeout_secs = timeout_secs

    def run(self, store: store_lib.Store) -> None:
        """Writes all that is ready in time, and the manifest. Never raises."""
        self._read_others()
        try:
            if self._snapshot.functions is not None:
                self._run(store, self._snapshot.functions)
        except Exception:
            logging.exception("%s: no executables in this save; the state is saved.", store.folder)
        finally:
            store.close()

    def _read_others(self) -> None:
        """Reads what later saves need of the step that functions were restored from.

        Once this save is committed, Orbax may delete that step.
        """
        try:
            for restored in self._snapshot.restored:
                self._in_time(restored.read_others)
        except Exception:
            logging.exception("What was saved beside the executables in use may be missing later.")

    def _run(self, store: store_lib.Store, saved: Mapping[str, _Executables]) -> None:
        start = time.perf_counter()
        tables = m.Tables()
        functions = {}
        for name, tell in saved.items():
            functions[name] = self._write_function(store, tables, name, tell)
        state = state_lib.describe(self._snapshot.state, tables)
        self._write_manifest(
            store,
            msgspec.structs.replace(
                tables.body(),
                created_by={
                    "orbax_aot": __version__,
                    "jax": jax.__version__,
                    "jaxlib": jaxlib.version.__version__,
                    "host": platform.node(),
                },
                kind=self._snapshot.kind,
                state=state,
                functions=functions,
            ),
        )
        jax.monitoring.record_event_duration_secs(
            "/jax/orbax_aot/save/commit_secs", time.perf_counter() - start
        )

    def _write_manifest(self, store: store_lib.Store, body: m.Body) -> None:
        """Writes the manifest, which tells of all that was late; has a little time of its own for that."""
        left = max(self._deadline - time.monotonic(), 0.0) + _MANIFEST_SECS
        deadline.within(left, lambda: store.write_manifest(body), "manifest")

    def _write_function(
        self,
        store: store_lib.Store,
        tables: m.Tables,
        name: str,
        tell: _Executables,
    ) -> m.Function:
        folder = store_lib.folder_name(name)
        try:
            executables = self._in_time(tell)
        except Exception as e:
            return m.Function(absent=_absent(name, e))
        if not executables:
            logging.warning("%s: never called or compiled, so there is nothing to save.", name)
            return m.Function(
                absent=m.Absent(code="NEVER_CALLED", detail="never called or compiled")
            )
        signatures: list[m.Signature] = []
        problems: list[m.Absent] = []
        seen: list[m.Signature] = []
        for executable in executables:
            try:
                artifact = self._in_time(lambda e=executable: e.pack(self._snapshot.portable))
                what = _identity(tables.adopt_signature(artifact.signature, artifact.body))
                if what in seen:
                    continue
                seen.append(what)
                where = f"{folder}/{len(signatures)}"
                write = lambda a=artifact, w=where: a.write(store, tables, w)
                signatures.append(self._in_time(write))
            except Exception as e:
                problems.append(_absent(name, e))
        if signatures:
            return m.Function(folder=folder, signatures=tuple(signatures))
        return m.Function(absent=problems[0])

    def _in_time(self, work: Callable[[], _T]) -> _T:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._timeout_secs:g} s")
        try:
            return deadline.within(left, work, "pack")
        except TimeoutError:
            raise TimeoutError(f"not done within {self._timeout_secs:g} s") from None


def sign(directory: epath.PathLike, trust: trust_lib.Trust, timeout_secs: float) -> None:
    """Signs what has been saved with the policy's private key; runs in the commit, on the primary. Never raises.

    Without a signature the step commits all the same, and whoever asks for one recompiles.
    """
    try:
        if not is_off():
            deadline.within(timeout_secs, lambda: _sign(directory, trust), "sign")
    except Exception:
        logging.exception("%s: executables not signed.", directory)


def _sign(directory: epath.PathLike, trust: trust_lib.Trust) -> None:
    from orbax_aot import signing

    assert trust.private_key is not None
    store = store_lib.Store(directory)
    if not store.exists():
        return
    manifest, content = store.open_manifest()
    signing.sign_item(
        store,
        manifest,
        content,
        trust.private_key,
        trust.password,
        trust.signing_certificate,
        trust.certificates,
    )


def _identity(signature: m.Signature) -> m.Signature:
    """Returns what tells one executable from another: a function that is restored into twice holds the same again."""
    return msgspec.structs.replace(signature, folder="", portable=None, portable_absent=None)


def _absent(name: str, error: Exception) -> m.Absent:
    """Returns why something is not saved, and says so in the log."""
    code = "NOT_SERIALIZABLE"
    if isinstance(error, TimeoutError):
        code = "TIMEOUT"
    elif isinstance(error, OSError):
        code = "NOT_SAVED"
    detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    logging.warning("%s: not saved (%s: %s)", name, code, detail)
    jax.monitoring.record_event("/jax/orbax_aot/save/absent", function=name, reason=code)
    return m.Absent(code=code, detail=detail)

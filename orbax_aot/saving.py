"""Saving the functions of a checkpoint: what is noted on the training thread, and what is written after it."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jaxlib.version
import msgspec
from absl import logging

from orbax_aot import deadline
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import restored as restored_lib
from orbax_aot import state as state_lib
from orbax_aot import store as store_lib
from orbax_aot import trust as trust_lib
from orbax_aot.overrides import is_off
from orbax_aot.version import __version__

if TYPE_CHECKING:
    from orbax_aot.handler import AotSave

_T = TypeVar("_T")
_MANIFEST_SECS = 10.0
_Executables = Callable[[], tuple[functions_lib.Executable, ...]]


def _snapshot_of(fn: Any, name: str) -> _Executables:
    """Notes what there is of a function now; asked later, off the training thread, since that can wait for loads."""
    if isinstance(fn, functions_lib.AotFunction):
        return fn.snapshot()
    if isinstance(fn, restored_lib.SavedFunction):
        return lambda: fn.executables
    if isinstance(fn, functions_lib.Executable):
        return lambda: (fn,)
    return lambda: (functions_lib.executable_of(fn, name),)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What of a save was seen on the training thread: references only, no arrays."""

    functions: dict[str, _Executables]
    state: state_lib.Snapshot | None
    kind: str
    portable: bool | Sequence[str]


def take_snapshot(args: AotSave) -> Snapshot | None:
    """Notes what is needed of a save's functions and state; None where no executables are to be saved. Never raises."""
    try:
        if args.fns is None or is_off() or jax.process_index() != 0:
            return None
        return Snapshot(
            functions={name: _snapshot_of(fn, name) for name, fn in args.fns.items()},
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
        try:
            self._run(store)
        except Exception:
            logging.exception("%s: no executables in this save; the state is saved.", store.folder)
        finally:
            store.close()

    def _run(self, store: store_lib.Store) -> None:
        start = time.perf_counter()
        tables = m.Tables()
        functions = {}
        for name, tell in self._snapshot.functions.items():
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
        for executable in executables:
            try:
                artifact = self._in_time(lambda e=executable: e.pack(self._snapshot.portable))
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


def sign(store: store_lib.Store, trust: trust_lib.Trust, timeout_secs: float) -> None:
    """Signs what has been saved, where the policy says so; runs in the commit, on the primary. Never raises.

    Without a signature the step commits all the same, and whoever asks for one recompiles.
    """
    if not trust.signs or is_off():
        return
    try:
        if store.exists():
            deadline.within(timeout_secs, lambda: _sign(store, trust), "sign")
    except Exception:
        logging.exception("%s: not signed.", store.folder)


def _sign(store: store_lib.Store, trust: trust_lib.Trust) -> None:
    from orbax_aot import signing

    assert trust.private_key is not None
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


def _absent(name: str, error: Exception) -> m.Absent:
    """Returns why something is not saved, and says so in the log."""
    code = "TIMEOUT" if isinstance(error, TimeoutError) else "NOT_SERIALIZABLE"
    detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    logging.warning("%s: not saved (%s: %s)", name, code, detail)
    jax.monitoring.record_event("/jax/orbax_aot/save/absent", function=name, reason=code)
    return m.Absent(code=code, detail=detail)

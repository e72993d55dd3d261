"""The Orbax v0 `CheckpointHandler`: when things are saved and restored. What and where is told elsewhere."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jaxlib.version
import msgspec
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import future

from orbax_aot import artifact as artifact_lib
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot import restored as restored_lib
from orbax_aot import state as state_lib
from orbax_aot import store as store_lib
from orbax_aot import topology
from orbax_aot.errors import IncompatibleExecutableError
from orbax_aot.report import Reason, ReasonCode, Verdict
from orbax_aot.version import __version__

_VERIFY = ("code", "program", "signature")
_ON_MISMATCH = ("recompile", "raise")
_T = TypeVar("_T")
_SAVABLE = (
    functions_lib.AotFunction,
    functions_lib.Executable,
    restored_lib.SavedFunction,
    jax.stages.Compiled,
)


def is_off() -> bool:
    """Whether `ORBAX_AOT=off` asks for weights only."""
    return os.environ.get("ORBAX_AOT", "").lower() in ("off", "0", "false", "no")


class Restored(NamedTuple):
    """What `restore` returns: the state (None for an item without one) and the functions."""

    state: Any
    fns: restored_lib.RestoredFunctions


class AotHandler(ocp.AsyncCheckpointHandler):
    """Stores compiled executables beside the state that another handler stores.

    The state's files are exactly those of the wrapped handler, and the item reports that handler's typestr, so that
    whoever has not this package restores the weights as ever. Executables lie under `<item>/_aot/`. Whatever goes
    wrong with them is logged, recorded as a reason, and never reaches Orbax.
    """

    def __init__(
        self,
        state_handler: ocp.CheckpointHandler | None = None,
        *,
        timeout_secs: float = 600.0,
    ):
        """Makes a handler.

        Args:
          state_handler: stores the state; `StandardCheckpointHandler` unless given.
          timeout_secs: seconds after which the executable part of a save is dropped, with the reason `TIMEOUT`, and
            the step commits without it.
        """
        self._state_handler: Any = state_handler or ocp.StandardCheckpointHandler()
        self._timeout_secs = timeout_secs
        self._json_handler = ocp.JsonCheckpointHandler()
        self._saves_state = True
        # Orbax asks the instance. The class's own typestr stays unique, since classes are registered by it.
        self.typestr = self._typestr  # type: ignore[method-assign]

    def _typestr(self) -> str:
        handler = self._state_handler if self._saves_state else self._json_handler
        return handler.typestr()

    # -- save ----------------------------------------------------------------------------------------------------

    async def async_save(self, directory: epath.Path, args: AotSave) -> list[Any] | None:
        """Starts a save. On the training thread only the state's own part and a snapshot of references run."""
        snapshot = self._take_snapshot(args)
        handler, handler_args = self._wrapped_save(args)
        if isinstance(handler, ocp.AsyncCheckpointHandler):
            futures = list(await handler.async_save(directory, args=handler_args) or [])
        else:
            handler.save(directory, args=handler_args)
            futures = []
        if snapshot is not None:
            futures.append(
                future.CommitFutureAwaitingContractedSignals(
                    self._commit(directory, snapshot), name="orbax_aot_save"
                )
            )
        return futures

    def save(self, directory: epath.Path, args: AotSave) -> None:
        """Saves and waits."""
        snapshot = self._take_snapshot(args)
        handler, handler_args = self._wrapped_save(args)
        handler.save(directory, args=handler_args)
        if snapshot is not None:
            _Saving(snapshot, self._timeout_secs).run(store_lib.Store(directory))

    def _wrapped_save(self, args: AotSave) -> tuple[Any, Any]:
        self._saves_state = args.item is not None or (self._saves_state and args.fns is None)
        if args.item is None:
            self._saves_state = False
            about = {"orbax_aot": __version__, "functions": sorted(args.fns or {})}
            return self._json_handler, ocp.args.JsonSave(about)
        self._saves_state = True
        if isinstance(args.item, ocp.args.CheckpointArgs):
            return self._state_handler, args.item
        save_args: Any = ocp.args.get_registered_args_cls(self._state_handler)[0]
        given = {"save_args": args.save_args, "custom_metadata": args.custom_metadata}
        return self._state_handler, save_args(
            args.item, **{k: v for k, v in given.items() if v is not None}
        )

    def _take_snapshot(self, args: AotSave) -> _Snapshot | None:
        try:
            if args.fns is None or is_off() or jax.process_index() != 0:
                return None
            return _Snapshot(
                functions={name: _snapshot_of(fn, name) for name, fn in args.fns.items()},
                state=state_lib.take_snapshot(args.item),
                kind="functions" if args.item is None else "state",
                portable=args.portable,
            )
        except Exception:
            logging.exception("orbax_aot: no executables in this save; the state is saved.")
            return None

    async def _commit(self, directory: epath.Path, snapshot: _Snapshot) -> None:
        """Serializes and writes; runs on a thread of Orbax's. Never raises."""
        try:
            saving = _Saving(snapshot, self._timeout_secs)
            saving.run(store_lib.Store(directory))
        except Exception:
            logging.exception("orbax_aot: no executables in this save; the state is saved.")

    def finalize(self, directory: epath.Path) -> None:
        """Passes on to the wrapped handler, where there is a state."""
        if self._has_state(directory):
            self._state_handler.finalize(directory)

    def close(self) -> None:
        self._state_handler.close()
        self._json_handler.close()

    def metadata(self, directory: epath.Path) -> Any:
        """Returns the wrapped handler's metadata of the state; for an item without state, what is in it."""
        if self._has_state(directory):
            return self._state_handler.metadata(directory)
        return self._json_handler.restore(directory)

    def _has_state(self, directory: epath.Path) -> bool:
        directory = epath.Path(directory)
        try:
            return not (directory / "metadata").exists() or (directory / "_METADATA").exists()
        except OSError:
            return True

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, directory: epath.Path, args: AotRestore | None = None) -> Restored:
        """Restores the state, and meanwhile loads the executables in the background.

        Returns:
          The state as the wrapped handler restores it, and the functions. A load that is still running is joined at
          the first call.

        Raises:
          IncompatibleExecutableError: with `on_mismatch="raise"`, before the state is touched, where a function
            cannot be loaded.
          Whatever the wrapped handler raises.
        """
        args = args or AotRestore()
        directory = epath.Path(directory)
        restoring = _Restoring(directory, args)
        restoring.start()
        if args.on_mismatch == "raise":
            restoring.require_fit()
        state = self._restore_state(directory, args, restoring)
        return Restored(state, restoring.finish())

    def _restore_state(self, directory: epath.Path, args: AotRestore, restoring: _Restoring) -> Any:
        if not self._has_state(directory):
            return None
        restore_args: Any = ocp.args.get_registered_args_cls(self._state_handler)[1]
        if isinstance(args.item, ocp.args.CheckpointArgs):
            wrapped_args = args.item
        elif args.item is not None:
            wrapped_args = restore_args(args.item)
        else:
            target = restoring.make_target(self._state_handler)
            wrapped_args = restore_args() if target is None else restore_args(target)
        state = self._state_handler.restore(directory, args=wrapped_args)
        return restoring.give_weak_types(state)


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


def executables_of(fn: Any, name: str) -> tuple[functions_lib.Executable, ...]:
    """Returns what there is of a function that `AotSave` takes; waits for loads under way."""
    return _snapshot_of(fn, name)()


# -- save, off the training thread ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """What of a save was seen on the training thread: references only, no arrays."""

    functions: dict[str, _Executables]
    state: state_lib.Snapshot | None
    kind: str
    portable: bool | Sequence[str]


class _Saving:
    """One save's executables: packed by a worker, written by the caller, within a time limit."""

    def __init__(self, snapshot: _Snapshot, timeout_secs: float):
        self._snapshot = snapshot
        self._deadline = time.monotonic() + timeout_secs
        self._timeout_secs = timeout_secs

    def run(self, store: store_lib.Store) -> None:
        """Writes all that is ready in time, and the manifest. Never raises."""
        try:
            self._run(store)
        except Exception:
            logging.exception("%s: no executables in this save; the state is saved.", store.folder)

    def _run(self, store: store_lib.Store) -> None:
        start = time.perf_counter()
        tables = m.Tables()
        functions = {}
        for name, tell in self._snapshot.functions.items():
            functions[name] = self._write_function(store, tables, name, tell)
        state = state_lib.describe(self._snapshot.state, tables)
        store.write_manifest(
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
            )
        )
        jax.monitoring.record_event_duration_secs(
            "/jax/orbax_aot/save/commit_secs", time.perf_counter() - start
        )

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
                signatures.append(artifact.write(store, tables, where))
            except Exception as e:
                problems.append(_absent(name, e))
        if signatures:
            return m.Function(folder=folder, signatures=tuple(signatures))
        return m.Function(absent=problems[0])

    def _in_time(self, work: Callable[[], _T]) -> _T:
        """Works on a thread that can be left behind: what hangs in there must not hold the step back."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._timeout_secs:g} s")
        result: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as e:
                result.set_exception(e)

        threading.Thread(target=run, name="orbax_aot_pack", daemon=True).start()
        try:
            return result.result(timeout=left)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not done within {self._timeout_secs:g} s") from None


def _absent(name: str, error: Exception) -> m.Absent:
    """Returns why something is not saved, and says so in the log."""
    code = "TIMEOUT" if isinstance(error, TimeoutError) else "NOT_SERIALIZABLE"
    detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    logging.warning("%s: not saved (%s: %s)", name, code, detail)
    jax.monitoring.record_event("/jax/orbax_aot/save/absent", function=name, reason=code)
    return m.Absent(code=code, detail=detail)


# -- restore ---------------------------------------------------------------------------------------------------------


class _Restoring:
    """One restore's functions: read and decide, load, bind. Nothing in here raises but what is asked for."""

    def __init__(self, directory: epath.Path, args: AotRestore):
        self._directory = directory
        self._args = args
        self._store = store_lib.Store(directory)
        self._manifest: m.Manifest | None = None
        self._note = ""
        self._live: dict[str, functions_lib.AotFunction] = {}
        self._restored: dict[str, restored_lib.RestoredFunction] = {}
        self._machine: plan_lib.Machine | None = None
        self._devices: tuple[Any, ...] = ()
        self._mesh: jax.sharding.Mesh | None = None

    def start(self) -> None:
        """Reads the manifest, decides, and starts to load."""
        try:
            self._live = {
                name: functions_lib.as_aot_function(fn) for name, fn in self._args.live.items()
            }
            problem = None if is_off() else self._read_manifest()
            plans = self._decide(problem)
            self._restored = {name: self._prepare(name, plan) for name, plan in plans.items()}
        except Exception as e:
            logging.exception("%s: functions are not restored; the state is.", self._store.folder)
            reason = Reason(ReasonCode.LOAD_FAILED, f"{type(e).__name__}: {e}"[:300])
            names = self._args.names or tuple(self._saved_names())
            self._restored = {
                name: self._prepare(
                    name, plan_lib.FunctionPlan((), (reason,), name in self._args.live)
                )
                for name in names
            }
        for function in self._restored.values():
            function.start()

    def _saved_names(self) -> Sequence[str]:
        return sorted(self._manifest.functions) if self._manifest is not None else ()

    def _read_manifest(self) -> Reason | None:
        """Reads the manifest; returns why that failed, None where it did not or where there is none."""
        try:
            if not self._store.exists():
                self._note = f"{self._directory}: no executables (no {store_lib.FOLDER} folder)"
                return None
            self._manifest = self._store.read_manifest()
            return None
        except Exception as e:
            self._note = f"{self._store.manifest_path}: {e}"
            logging.warning("%s", self._note)
            return Reason(ReasonCode.CORRUPT, f"{type(e).__name__}: {e}"[:300])

    def _decide(self, problem: Reason | None) -> dict[str, plan_lib.FunctionPlan]:
        args = self._args
        mesh = args.mesh if args.mesh is not None else topology.mesh_of_tree(args.item)
        self._mesh = mesh
        anchor = args.devices or (None if mesh is None else tuple(mesh.devices.flat))
        client = anchor[0].client if anchor else None
        self._machine = topology.describe_machine(client)
        self._devices = tuple((client or jax.devices()[0].client).devices())
        index = {d: i for i, d in enumerate(self._devices)}
        functions = None
        if args.fns is not None:
            functions = {name: self._wanted(name) for name in args.names}
        request = plan_lib.Request(
            mesh=None
            if mesh is None
            else tuple(
                (str(n), int(s)) for n, s in zip(mesh.axis_names, mesh.devices.shape, strict=True)
            ),
            positions=() if mesh is None else tuple(index[d] for d in mesh.devices.flat),
            devices=None if args.devices is None else tuple(index[d] for d in args.devices),
            single=index.get(state_lib.single_device_of(args.item)),
            functions=functions,
            verify=args.effective_verify,
            disabled=is_off(),
        )
        return plan_lib.decide(self._manifest, self._machine, request, problem)

    def _wanted(self, name: str) -> plan_lib.Wanted:
        function = self._live.get(name)
        if function is None:
            return plan_lib.Wanted()
        code = function.function_code() if self._args.effective_verify == "code" else None
        return plan_lib.Wanted(live=True, code=code, options=function.compiler_options)

    def _prepare(self, name: str, plan: plan_lib.FunctionPlan) -> restored_lib.RestoredFunction:
        restored = restored_lib.RestoredFunction(
            name, plan, verify=self._args.effective_verify, on_mismatch=self._args.on_mismatch
        )
        if not plan.decisions:
            return restored
        assert self._manifest is not None
        body, function = self._manifest.body, self._manifest.functions[name]
        for i, (signature, decision) in enumerate(
            zip(function.signatures, plan.decisions, strict=True)
        ):
            devices = tuple(self._devices[j] for j in decision.assignment or ())
            saved = artifact_lib.SavedSignature(self._store, body, function, signature)
            place = self._rebuild_place(signature)
            restored.signatures.append(
                restored_lib.RestoredSignature(restored, i, saved, decision, devices, place)
            )
        return restored

    def _rebuild_place(self, signature: m.Signature) -> restored_lib.RebuildPlace:
        """Returns where a program that fits nowhere as it is would be rebuilt.

        On the mesh that is asked for; else on a mesh as it was saved, where there are enough devices; else on one.
        """
        assert self._manifest is not None and self._machine is not None
        mesh = self._mesh
        if mesh is not None:
            return restored_lib.RebuildPlace(mesh, tuple(mesh.devices.flat))
        given = self._args.devices
        local = [
            d
            for d, process in zip(self._devices, self._machine.topology.processes, strict=True)
            if process == self._machine.process
        ]
        devices = tuple(given or local)
        saved = plan_lib.find_main_mesh(signature, self._manifest.body)
        if saved is not None and (
            len(given) == saved.size if given else len(devices) >= saved.size
        ):
            return restored_lib.RebuildPlace(state_lib.make_mesh(saved, devices), devices)
        if given and len(given) > 1 and saved is not None:
            reason = Reason(
                ReasonCode.DEVICE_COUNT,
                f"for {saved.size} devices",
                f"{len(given)} devices; pass mesh= to say how to use them",
            )
            return restored_lib.RebuildPlace(reason=reason)
        return restored_lib.RebuildPlace(None, devices[:1])

    def require_fit(self) -> None:
        """Raises unless each function was loaded or remapped, or is pending; waits for loads."""
        bad = []
        for name, restored in sorted(self._restored.items()):
            report = restored.report()
            if report.verdict not in (Verdict.LOADED, Verdict.REMAPPED, Verdict.PENDING):
                bad.append(f"{name}: {report}")
        if bad:
            listed = "\n  ".join(bad)
            raise IncompatibleExecutableError(
                f"{self._directory}: saved executables cannot be used here:\n  {listed}\n"
                "The state was not touched. Pass on_mismatch='recompile' to compile them anew."
            )

    def make_target(self, state_handler: Any) -> Any:
        """Returns a target sharded as the executables expect; None to leave that to the wrapped handler."""
        if self._manifest is None or not isinstance(state_handler, ocp.StandardCheckpointHandler):
            return None
        try:
            return state_lib.make_target(
                state_handler.metadata(self._directory), self._manifest.body, self._placements()
            )
        except Exception:
            logging.exception("%s: the state comes back as Orbax places it.", self._directory)
            return None

    def _placements(self) -> state_lib.Placements:
        args = self._args
        programs = tuple(
            program
            for restored in self._restored.values()
            for signature in restored.signatures
            if (program := self._program(signature)) is not None
        )
        return state_lib.Placements(
            mesh=args.mesh,
            devices=None if args.devices is None else tuple(args.devices),
            programs=programs,
            fallback=self._devices,
        )

    def _program(self, restored: restored_lib.RestoredSignature) -> state_lib.Program | None:
        """Returns how a signature will run here, as far as it is decided; None where nothing saved runs."""
        variant, signature = restored.variant, restored.signature
        if variant is not None and restored.devices:
            return state_lib.Program(signature, variant, devices=restored.devices)
        if restored.verdict is not Verdict.REBUILT or restored.place.mesh is None:
            return None
        assert self._manifest is not None
        main = plan_lib.find_main_variant(signature, self._manifest.body)
        if main is None:
            return None
        return state_lib.Program(signature, main, mesh=restored.place.mesh)

    def give_weak_types(self, state: Any) -> Any:
        """Returns the state with the weak types it was saved with, where it comes back strong."""
        if self._manifest is None:
            return state
        try:
            return state_lib.give_weak_types(state, self._manifest.body.state)
        except Exception:
            logging.exception("%s: weak types are not restored.", self._directory)
            return state

    def finish(self) -> restored_lib.RestoredFunctions:
        """Binds live functions and returns all."""
        functions: dict[str, Any] = {}
        for name, restored in self._restored.items():
            live = self._live.get(name)
            if live is not None:
                live.bind(restored)
                functions[name] = live
            else:
                functions[name] = restored_lib.SavedFunction(restored)
                if restored.plan.verdict is Verdict.REFUSED:
                    reasons = restored.plan.reasons or tuple(
                        r for d in restored.plan.decisions for r in d.reasons
                    )
                    restored.announce(Verdict.REFUSED, reasons, 0.0)
        return restored_lib.RestoredFunctions(functions, self._restored, self._note)


# -- arguments -------------------------------------------------------------------------------------------------------


def _require_names(names: Sequence[Any], where: str) -> None:
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{where}: function names are non-empty strings, got {name!r}.")


@ocp.args.register_with_handler(AotHandler, for_save=True)
@dataclasses.dataclass
class AotSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
      item: the state; None makes an item of executables only, for a `Composite`. May also be save args of the wrapped
        handler.
      fns: maps names to `AotFunction`, `Executable` or `jax.stages.Compiled`.
      save_args: as in `StandardSave`.
      custom_metadata: as in `StandardSave`.
      portable: also store StableHLO, from which other machines and meshes are served without the source; or for which
        platforms, as `jax.export` names them.

    Raises:
      TypeError: `fns` holds something else; at construction, not during the save.
    """

    item: Any = None
    fns: Mapping[str, Any] | None = dataclasses.field(default=None, kw_only=True)
    save_args: Any = dataclasses.field(default=None, kw_only=True)
    custom_metadata: Any = dataclasses.field(default=None, kw_only=True)
    portable: bool | Sequence[str] = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.portable, bool):
            if isinstance(self.portable, str) or not all(isinstance(p, str) for p in self.portable):
                raise TypeError(
                    "AotSave(portable=...) is True, False or a sequence of platforms such as ('cpu', 'tpu'); "
                    f"got {self.portable!r}."
                )
            self.portable = tuple(self.portable)
        if self.fns is None:
            return
        if not isinstance(self.fns, Mapping):
            raise TypeError(
                "AotSave(fns=...) takes a mapping from names to AotFunction (oaot.jit), Executable or "
                f"jax.stages.Compiled; got {type(self.fns).__name__}."
            )
        _require_names(list(self.fns), "AotSave(fns=...)")
        for name, fn in self.fns.items():
            if not isinstance(fn, _SAVABLE):
                raise TypeError(
                    f"AotSave(fns={{{name!r}: ...}}) takes an AotFunction (oaot.jit), an Executable or a "
                    f"jax.stages.Compiled; got {type(fn).__name__}. Wrap a function by oaot.jit, once, and call "
                    "what that returns."
                )
        self.fns = dict(self.fns)


@ocp.args.register_with_handler(AotHandler, for_restore=True)
@dataclasses.dataclass
class AotRestore(ocp.args.CheckpointArgs):
    """What to restore. All fields are optional.

    Attributes:
      item: abstract target of the state, as in `StandardRestore`. May also be restore args of the wrapped handler.
      fns: live functions by name, or a sequence of names to load without source; all that is saved by default.
      mesh: where sharded functions go; by default the mesh in the target's shardings, else the first devices.
      devices: the same as a flat list, device by device.
      verify: how a live function is compared with the saved one: "code" (a fingerprint of the Python code; programs
        where that cannot tell), "program" (traced and lowered at the first call), or "signature" (trust the caller).
      on_mismatch: "recompile", or "raise" before the state is touched.

    Raises:
      TypeError, ValueError: a field holds what is not accepted; at construction.
      DeviceTypeError, ClientMismatchError: `devices` are not devices of one client.
    """

    item: Any = None
    fns: Mapping[str, Any] | Sequence[str] | None = dataclasses.field(default=None, kw_only=True)
    mesh: jax.sharding.Mesh | None = dataclasses.field(default=None, kw_only=True)
    devices: Sequence[Any] | None = dataclasses.field(default=None, kw_only=True)
    verify: str = dataclasses.field(default="code", kw_only=True)
    on_mismatch: str = dataclasses.field(default="recompile", kw_only=True)

    def __post_init__(self) -> None:
        for value, accepted, name in (
            (self.verify, _VERIFY, "verify"),
            (self.on_mismatch, _ON_MISMATCH, "on_mismatch"),
        ):
            if value not in accepted:
                raise ValueError(f"AotRestore({name}=...) is one of {accepted}; got {value!r}.")
        if self.mesh is not None and self.devices is not None:
            raise TypeError("AotRestore takes mesh= or devices=, not both.")
        if self.mesh is not None and not isinstance(self.mesh, jax.sharding.Mesh):
            raise TypeError(
                f"AotRestore(mesh=...) is a jax.sharding.Mesh; got {type(self.mesh).__name__}."
            )
        if self.devices is not None:
            self.devices = topology.require_devices(self.devices)
            if len(set(self.devices)) != len(self.devices):
                raise ValueError("AotRestore(devices=...) names a device twice.")
        if self.fns is None:
            return
        if isinstance(self.fns, Mapping):
            _require_names(list(self.fns), "AotRestore(fns=...)")
            for name, fn in self.fns.items():
                if fn is not None and not callable(fn):
                    raise TypeError(
                        f"AotRestore(fns={{{name!r}: ...}}) takes a function, jitted function or AotFunction; "
                        f"got {type(fn).__name__}."
                    )
                if isinstance(fn, functions_lib.Executable | jax.stages.Compiled):
                    raise TypeError(
                        f"AotRestore(fns={{{name!r}: ...}}): a compiled function is no live function; pass the "
                        "function it was compiled from, or the name alone."
                    )
            self.fns = dict(self.fns)
        elif isinstance(self.fns, Sequence) and not isinstance(self.fns, str | bytes):
            _require_names(self.fns, "AotRestore(fns=...)")
            self.fns = tuple(self.fns)
        else:
            raise TypeError(
                "AotRestore(fns=...) takes a mapping from names to functions, or a sequence of names; got "
                f"{type(self.fns).__name__}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names asked for; empty where all are."""
        return tuple(self.fns or ())

    @property
    def live(self) -> dict[str, Any]:
        """The live functions by name."""
        if not isinstance(self.fns, Mapping):
            return {}
        return {
            name: fn
            for name, fn in self.fns.items()
            if fn is not None and not isinstance(fn, restored_lib.SavedFunction)
        }

    @property
    def effective_verify(self) -> str:
        """`verify`, unless the environment variable `ORBAX_AOT_VERIFY` says otherwise."""
        asked = os.environ.get("ORBAX_AOT_VERIFY", "")
        return asked if asked in _VERIFY else self.verify

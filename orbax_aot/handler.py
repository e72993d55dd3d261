"""The Orbax v0 `CheckpointHandler`: when things are saved and restored. What and where is told elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import future

from orbax_aot import functions as functions_lib
from orbax_aot import restored as restored_lib
from orbax_aot import restoring as restoring_lib
from orbax_aot import saving as saving_lib
from orbax_aot import store as store_lib
from orbax_aot import topology
from orbax_aot import trust as trust_lib

_VERIFY = ("code", "program", "signature")
_ON_MISMATCH = ("recompile", "raise")


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
        trust: trust_lib.Trust | None = None,
        timeout_secs: float = 600.0,
        probe: bool = False,
    ):
        """Makes a handler.

        Args:
          state_handler: stores the state; `StandardCheckpointHandler` unless given.
          trust: whose executables are loaded; `Trust.owner()` unless given. With a private key, saves are signed.
          timeout_secs: seconds after which the executable part of a save is dropped, with the reason `TIMEOUT`, and
            the step commits without it; also how long a restore waits for the manifest, and the processes of a job
            for each other.
          probe: try executables in a child process before they are loaded here; for jobs of one process, on devices
            that a child can open. Costs the start of a process.
        """
        self._state_handler: Any = state_handler or ocp.StandardCheckpointHandler()
        self._trust = trust or trust_lib.Trust.owner()
        self._timeout_secs = timeout_secs
        self._probe = probe
        self._json_handler = ocp.JsonCheckpointHandler()
        self._saves_state = True
        self._restored: weakref.WeakSet[restored_lib.RestoredFunction] = weakref.WeakSet()
        # Orbax asks the instance. The class's own typestr stays unique, since classes are registered by it.
        self.typestr = self._typestr  # type: ignore[method-assign]

    def _typestr(self) -> str:
        handler = self._state_handler if self._saves_state else self._json_handler
        return handler.typestr()

    # -- save ----------------------------------------------------------------------------------------------------

    async def async_save(self, directory: epath.Path, args: AotSave) -> list[Any] | None:
        """Starts a save. On the training thread only the state's own part and a snapshot of references run."""
        snapshot = saving_lib.take_snapshot(args, tuple(self._restored))
        handler, handler_args = self._wrapped_save(args)
        if isinstance(handler, ocp.AsyncCheckpointHandler):
            futures = list(await handler.async_save(directory, args=handler_args) or [])
        else:
            # Orbax makes the folder meanwhile. This blocks training, as handlers that are not asynchronous do.
            future.CommitFutureAwaitingContractedSignals(
                asyncio.to_thread(handler.save, directory, args=handler_args)
            ).result()
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
        snapshot = saving_lib.take_snapshot(args, tuple(self._restored))
        handler, handler_args = self._wrapped_save(args)
        handler.save(directory, args=handler_args)
        if snapshot is not None:
            self._write(directory, snapshot)

    def _wrapped_save(self, args: AotSave) -> tuple[Any, Any]:
        self._saves_state = args.item is not None or (self._saves_state and args.fns is None)
        if args.item is None:
            self._saves_state = False
            return self._json_handler, ocp.args.JsonSave(saving_lib.about_functions(args))
        self._saves_state = True
        if isinstance(args.item, ocp.args.CheckpointArgs):
            return self._state_handler, args.item
        save_args: Any = ocp.args.get_registered_args_cls(self._state_handler)[0]
        given = {"save_args": args.save_args, "custom_metadata": args.custom_metadata}
        return self._state_handler, save_args(
            args.item, **{k: v for k, v in given.items() if v is not None}
        )

    async def _commit(self, directory: epath.Path, snapshot: saving_lib.Snapshot) -> None:
        """Serializes and writes; runs on a thread of Orbax's."""
        self._write(directory, snapshot)

    def _write(self, directory: epath.Path, snapshot: saving_lib.Snapshot) -> None:
        """Serializes and writes. Never raises."""
        try:
            saving = saving_lib.Saving(snapshot, self._timeout_secs)
            saving.run(store_lib.Store(directory))
        except Exception:
            logging.exception("orbax_aot: no executables in this save; the state is saved.")

    def finalize(self, directory: epath.Path) -> None:
        """Passes on to the wrapped handler, where there is a state; then signs, which takes the state's own index."""
        if restoring_lib.has_state(directory):
            self._state_handler.finalize(directory)
        saving_lib.sign(directory, self._trust, self._timeout_secs)

    def close(self) -> None:
        self._state_handler.close()
        self._json_handler.close()

    def metadata(self, directory: epath.Path) -> Any:
        """Returns the wrapped handler's metadata of the state; for an item without state, what is in it."""
        if restoring_lib.has_state(directory):
            return self._state_handler.metadata(directory)
        return self._json_handler.restore(directory)

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
        restoring = restoring_lib.begin(
            directory, args, self._timeout_secs, trust=self._trust, probe=self._probe
        )
        if args.on_mismatch == "raise":
            restoring.require_fit()
        state = self._restore_state(directory, args, restoring)
        fns = restoring.finish()
        self._restored.update(restoring.functions)
        return Restored(state, fns)

    def _restore_state(
        self,
        directory: epath.Path,
        args: AotRestore,
        restoring: restoring_lib.Restoring | restoring_lib.NothingRestored,
    ) -> Any:
        if not restoring_lib.has_state(directory):
            return None
        restore_args: Any = ocp.args.get_registered_args_cls(self._state_handler)[1]
        if isinstance(args.item, ocp.args.CheckpointArgs):
            wrapped_args = args.item
        elif args.item is not None:
            wrapped_args = restore_args(args.item)
        else:
            target = None
            if isinstance(self._state_handler, ocp.StandardCheckpointHandler):
                target = restoring.make_target(lambda: self._state_handler.metadata(directory))
            wrapped_args = restore_args() if target is None else restore_args(target)
        handler: Any = self._state_handler
        with restoring.timeline.span("state", "weights"):
            state = handler.restore(directory, args=wrapped_args)
        return restoring.give_weak_types(state)


# -- arguments -------------------------------------------------------------------------------------------------------


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
        self.portable = saving_lib.require_portable(self.portable)
        self.fns = saving_lib.require_savable(self.fns)


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
            saving_lib.require_names(list(self.fns), "AotRestore(fns=...)")
            for name, fn in self.fns.items():
                if fn is not None and not callable(fn):
                    raise TypeError(
                        f"AotRestore(fns={{{name!r}: ...}}) takes a function, jitted function or AotFunction; "
                        f"got {type(fn).__name__}."
                    )
                functions_lib.require_pure(fn)
                if isinstance(fn, functions_lib.Executable | jax.stages.Compiled):
                    raise TypeError(
                        f"AotRestore(fns={{{name!r}: ...}}): a compiled function is no live function; pass the "
                        "function it was compiled from, or the name alone."
                    )
            self.fns = dict(self.fns)
        elif isinstance(self.fns, Sequence) and not isinstance(self.fns, str | bytes):
            saving_lib.require_names(self.fns, "AotRestore(fns=...)")
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

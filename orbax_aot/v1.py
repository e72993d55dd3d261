"""The handlers for `orbax.checkpoint.v1`, over the same files as the v0 handler.

    import orbax_aot.v1 as oaot_v1

    ocp.save_checkpointables(path, {"state": oaot_v1.AotSave(state, fns={"step": step})})
    loaded = ocp.load_checkpointables(path, {"state": oaot_v1.AotRestore(target, fns={"step": step})})
    state, fns = loaded["state"]

Importing this module registers the handlers for every `Context` made afterwards; `add_handlers` adds them to a registry
of one's own. Without `AotRestore` a checkpointable comes back as it does without this package.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp_v0
from etils import epath

try:
    from orbax.checkpoint import v1 as ocp  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # orbax-checkpoint 0.12 has it among the experiments
    from orbax.checkpoint.experimental import v1 as ocp

from orbax_aot import restoring as restoring_lib
from orbax_aot import saving as saving_lib
from orbax_aot import store as store_lib
from orbax_aot.handler import AotRestore, Restored

__all__ = ["AotFunctionsHandler", "AotHandler", "AotRestore", "AotSave", "Restored", "add_handlers"]


@dataclasses.dataclass
class AotSave:
    """What to save as one checkpointable.

    Attributes:
      item: the state, a tree that Orbax's `PyTreeHandler` takes; None for a checkpointable of executables only.
      fns: maps names to `AotFunction`, `Executable` or `jax.stages.Compiled`.
      portable: also store StableHLO, from which other machines and meshes are served without the source; or for which
        platforms, as `jax.export` names them.
      timeout_secs: seconds after which the executable part is dropped, with the reason `TIMEOUT`, and the checkpoint
        commits without it.

    Raises:
      TypeError: `fns` or `portable` holds something else; at construction, not during the save.
    """

    item: Any = None
    fns: Mapping[str, Any] | None = dataclasses.field(default=None, kw_only=True)
    portable: bool | Sequence[str] = dataclasses.field(default=True, kw_only=True)
    timeout_secs: float = dataclasses.field(default=600.0, kw_only=True)

    def __post_init__(self) -> None:
        self.portable = saving_lib.require_portable(self.portable)
        self.fns = saving_lib.require_savable(self.fns)
        if isinstance(self.item, ocp_v0.args.CheckpointArgs):
            raise TypeError(
                "AotSave(item) takes the state itself here, not save arguments of orbax.checkpoint v0; set options of "
                "arrays in the Context."
            )

    # Orbax binds the name "state" to its own handler, which knows no AotSave. It prefers whoever can handle a
    # checkpointable over that binding only where the checkpointable is "stateful": where it has these two methods.

    async def save(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax where the handlers of this module are not registered; raises `TypeError`."""
        raise TypeError(_NOT_REGISTERED)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax where a save's argument is passed to a load; raises `TypeError`."""
        raise TypeError("AotSave says what to save; pass AotRestore to load_checkpointables.")


_NOT_REGISTERED = (
    "The handlers of orbax_aot.v1 are not in this Context's registry: import orbax_aot.v1 before the Context is made, "
    "or pass the registry to orbax_aot.v1.add_handlers."
)


class _Handler(ocp.CheckpointableHandler):
    """What both handlers share: a checkpointable is read by what lies in its folder."""

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, AotRestore)

    async def load(
        self, directory: epath.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Starts to load executables in the background, and returns what loads the state and binds the functions.

        Returns:
          An awaitable of `Restored`, for an `AotRestore`; else of what Orbax's own handler loads.

        Raises:
          IncompatibleExecutableError: with `on_mismatch="raise"`, before the state is touched, where a function
            cannot be loaded.
        """
        directory = epath.Path(directory)
        args = abstract_checkpointable
        if not isinstance(args, AotRestore):
            return await _plain_handler(directory).load(directory, args)
        if isinstance(args.item, ocp_v0.args.CheckpointArgs):
            raise TypeError(
                "AotRestore(item) takes an abstract tree here, not restore arguments of orbax.checkpoint v0; set "
                "options of arrays in the Context."
            )
        restoring = restoring_lib.begin(directory, args)
        if args.on_mismatch == "raise":
            restoring.require_fit()
        if not restoring_lib.has_state(directory):
            return _finish(restoring)
        handler = ocp.handlers.PyTreeHandler()
        target = args.item
        if target is None:
            metadata = await _metadata_or_error(handler, directory)
            target = restoring.make_target(lambda: _raised(metadata))
        return _finish(restoring, await handler.load(directory, target))

    async def metadata(self, directory: epath.Path) -> Any:
        """Returns the metadata of the state; for a checkpointable without state, what is in it."""
        directory = epath.Path(directory)
        handler = _plain_handler(directory)
        if restoring_lib.has_state(directory):
            return await handler.metadata(directory)
        return await (await handler.load(directory))


class AotHandler(_Handler):
    """Stores compiled executables beside a state.

    The state's files are those of Orbax's `PyTreeHandler`, and the checkpoint names that handler, so that whoever has
    not this package loads the weights as ever. Executables lie under `<checkpointable>/_aot/`. Whatever goes wrong
    with them is logged, recorded as a reason, and never reaches Orbax.
    """

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, AotSave) and checkpointable.item is not None

    async def save(self, directory: Any, checkpointable: AotSave) -> Awaitable[None]:
        """Starts a save. On the training thread only the state's own part and a snapshot of references run."""
        snapshot = saving_lib.take_snapshot(checkpointable)
        state = await ocp.handlers.PyTreeHandler().save(directory, checkpointable.item)
        return _commit(directory, state, snapshot, checkpointable.timeout_secs)


class AotFunctionsHandler(_Handler):
    """Stores compiled executables as a checkpointable of their own."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, AotSave) and checkpointable.item is None

    async def save(self, directory: Any, checkpointable: AotSave) -> Awaitable[None]:
        """Starts a save. On the training thread only a snapshot of references runs."""
        snapshot = saving_lib.take_snapshot(checkpointable)
        about = await ocp.handlers.JsonHandler(filename="metadata").save(
            directory, saving_lib.about_functions(checkpointable)
        )
        return _commit(directory, about, snapshot, checkpointable.timeout_secs)


def _plain_handler(directory: epath.Path) -> Any:
    """Returns the handler that reads a checkpointable without this package."""
    if restoring_lib.has_state(directory):
        return ocp.handlers.PyTreeHandler()
    return ocp.handlers.JsonHandler()


async def _commit(
    directory: Any,
    state: Awaitable[None],
    snapshot: saving_lib.Snapshot | None,
    timeout_secs: float,
) -> None:
    """Writes state and executables at the same time. Raises what the state's part raises."""
    if snapshot is None:
        await state
    else:
        await asyncio.gather(state, _write_executables(directory, snapshot, timeout_secs))


async def _write_executables(
    directory: Any, snapshot: saving_lib.Snapshot, timeout_secs: float
) -> None:
    store = store_lib.Store(await directory.await_creation())
    # On a thread, since Orbax writes all checkpointables in one event loop.
    await asyncio.to_thread(saving_lib.Saving(snapshot, timeout_secs).run, store)


async def _metadata_or_error(handler: Any, directory: epath.Path) -> Any:
    try:
        return await handler.metadata(directory)
    except Exception as e:
        return e


def _raised(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


async def _finish(
    restoring: restoring_lib.Restoring | restoring_lib.NothingRestored,
    state: Awaitable[Any] | None = None,
) -> Restored:
    if state is None:
        return Restored(None, restoring.finish())
    start = time.perf_counter()
    found = await state
    return Restored(restoring.take_state(found, start), restoring.finish())


def _name_as(handler: type, v0_handler: Any) -> None:
    """Makes Orbax write down another handler's name for a handler's checkpointables.

    Orbax takes that name from the class. Under the name of a v0 handler, each API reads what the other wrote, and so
    does an Orbax that has not this package, without a warning.
    """
    handler.__module__, _, handler.__qualname__ = v0_handler.typestr().rpartition(".")


_name_as(AotHandler, ocp_v0.StandardCheckpointHandler)
_name_as(AotFunctionsHandler, ocp_v0.JsonCheckpointHandler)


def add_handlers(registry: Any) -> Any:
    """Adds the handlers to a registry, such as `ocp.handlers.local_registry()` returns; once for each registry.

    Returns:
      The registry.
    """
    present = {handler for handler, name in registry.get_all_entries() if name is None}
    for handler in (AotHandler, AotFunctionsHandler):
        if handler not in present:
            registry.add(handler)
    return registry


for _handler in (AotHandler, AotFunctionsHandler):
    ocp.handlers.register_handler(_handler)

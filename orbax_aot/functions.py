"""Functions that keep their executables: `jit`, `compile`, `AotFunction` and `Executable`."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import msgspec
from absl import logging

from orbax_aot import artifact as artifact_lib
from orbax_aot import crash, topology, trees
from orbax_aot import executable as executable_lib
from orbax_aot import manifest as m
from orbax_aot._jax import compiled as compiled_lib
from orbax_aot._jax import config as config_lib
from orbax_aot._jax import context as context_lib
from orbax_aot._jax import dispatch, missing, values
from orbax_aot._jax import trees as trees_lib
from orbax_aot.errors import NotSerializableError, UnsupportedFunctionError

# More executables than this in one function are almost always a shape that changes from step to step.
_MANY_SIGNATURES = 64
# No more than this many are kept, lest such a function fill memory and checkpoints.
_MAX_SIGNATURES = 512


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    platforms: Sequence[str] | None = None,
    **jit_kwargs: Any,
) -> Any:
    """Like `jax.jit`, but keeps what it compiles, so that a checkpoint can carry it.

    Args:
      fun: what `jax.jit` takes, or a jitted function. Left out, a decorator is returned.
      platforms: store StableHLO for these platforms, as `jax.export` names them, whatever `AotSave(portable=...)`
        says; it is lowered for them right when the function is compiled, under the caller's contexts.
      **jit_kwargs: the keyword arguments of `jax.jit`, with its meaning.

    Returns:
      An `AotFunction`, called as the jitted function would be.

    Raises:
      UnsupportedFunctionError: `fun` is no function, or one that is compiled already.
    """
    if fun is None:
        return functools.partial(jit, platforms=platforms, **jit_kwargs)
    return AotFunction(fun, platforms=platforms, **jit_kwargs)


def compile(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Executable:
    """Compiles a function for arguments of the given types, ahead of time.

    Args:
      fun: a function, jitted function or `AotFunction`.
      *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
      **kwargs: keyword arguments, likewise.

    Raises:
      UnsupportedFunctionError: `fun` is no function, or one that is compiled already.
    """
    return as_aot_function(fun).compile(*args, **kwargs)


def require_pure(fun: Any) -> None:
    """Raises `UnsupportedFunctionError` for what `nnx.jit` returns, with the pattern to use instead.

    Under jit it runs, but what it writes into the modules it is given is lost without a word.
    """
    kind = type(fun)
    if kind.__module__.startswith("flax.nnx") and hasattr(fun, "jitted_fn"):
        raise UnsupportedFunctionError(
            f"Unsupported type: {kind.__module__}.{kind.__qualname__}. What nnx.jit returns writes into the modules it "
            f"is given, which a stored executable cannot. {_NNX_PATTERN}"
        )


_NNX_PATTERN = """Jit a function of their state instead:

    graph, state = nnx.split((model, optimizer))

    @oaot.jit
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = train(model, optimizer, batch)  # the function given to nnx.jit
        return nnx.state((model, optimizer)), loss

    state, loss = step(state, batch)
    nnx.update((model, optimizer), state)  # where the modules themselves are needed"""


def as_aot_function(fun: Any) -> AotFunction:
    """Returns `fun` if it is an `AotFunction`, else one that wraps it."""
    return fun if isinstance(fun, AotFunction) else AotFunction(fun)


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A call traced and lowered, with the fingerprint of the code that was traced and the context it was traced in."""

    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    code: m.Code
    context: context_lib.ThreadContext
    secs: float


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an executable came from: "compiled", "loaded", "remapped" or "rebuilt", and in how many seconds."""

    how: str
    secs: float = 0.0
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Argument:
    """One leaf of a signature. `sharding` is the one the executable expects or returns."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any
    donated: bool = False


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """The arguments and results of an executable by key path, in flat order."""

    inputs: dict[str, Argument]
    outputs: dict[str, Argument]


def compiled_signature(compiled: jax.stages.Compiled) -> CallSignature:
    """Returns the signature of a compiled function."""
    is_info = lambda x: isinstance(x, jax.stages.ArgInfo)
    infos = jax.tree.leaves(compiled.args_info, is_leaf=is_info)
    in_avals = [info._aval for info in infos]
    out_avals, out_shardings = compiled_lib.visible_outputs(compiled)
    in_shardings = compiled_lib.argument_shardings(compiled)

    def describe(
        paths: Sequence[str], avals: Any, shardings: Any, donated: Any
    ) -> dict[str, Argument]:
        return {
            path: Argument(a.shape, a.dtype, bool(getattr(a, "weak_type", False)), s, d)
            for path, a, s, d in zip(paths, avals, shardings, donated, strict=True)
        }

    return CallSignature(
        describe(
            trees.argument_paths(compiled.args_info, is_leaf=is_info),
            in_avals,
            in_shardings,
            [info.donated for info in infos],
        ),
        describe(
            trees.leaf_paths(trees.dummy(compiled.out_tree)),
            out_avals,
            out_shardings,
            [False] * len(out_avals),
        ),
    )


class Executable:
    """One compiled signature of a function. Callable, as the `jax.stages.Compiled` it holds."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        *,
        name: str = "",
        origin: Origin | None = None,
        lowering: Lowering | None = None,
        static: tuple[tuple[str, Any], ...] = (),
        context: Mapping[str, Any] | None = None,
        placements: Sequence[Any] | None = None,
        environment: m.Environment | None = None,
        from_persistent_cache: bool = False,
        artifact: artifact_lib.Artifact | None = None,
        complete: Callable[[artifact_lib.Artifact], artifact_lib.Artifact] | None = None,
    ):
        """Made by `compile`, `AotFunction` and restores.

        `artifact` is what is stored of it already. `complete` is called once, when it is saved, with that (or with
        what was packed of it now) and returns it together with what belongs to it in the checkpoint it came from.
        """
        self.compiled = compiled
        self.name = name
        self.origin = origin or Origin("compiled")
        self._lowering = lowering
        self._static = static
        self._context = None if context is None else dict(context)
        self._placements = (
            None if placements is None else [p is not None or None for p in placements]
        )
        self._environment = environment
        self._from_persistent_cache = from_persistent_cache
        self._artifact = artifact
        self._complete = complete
        self._exported: tuple[bytes | None, m.Absent | None] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Executable({self.name!r}, {self.origin.how}, {len(self.devices)} devices)"

    def __reduce__(self) -> Any:
        raise TypeError(
            "An Executable cannot be pickled or copied; save it with AotSave(fns={...}) instead."
        )

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices it runs on, flat, in the order of its device assignment."""
        return compiled_lib.devices_of(self.compiled)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh of its inputs and results; None where they have none."""
        signature = self.signature
        leaves = (*signature.inputs.values(), *signature.outputs.values())
        return topology.mesh_of_shardings([leaf.sharding for leaf in leaves])

    @property
    def signature(self) -> CallSignature:
        """Inputs and outputs by key path."""
        return compiled_signature(self.compiled)

    @property
    def cost(self) -> dict[str, float]:
        """XLA's estimate of operations (`flops`) and bytes (`bytes_accessed`) for one call."""
        return compiled_lib.cost_of(self.compiled)[0]

    @property
    def memory(self) -> dict[str, int]:
        """XLA's memory needs for one call, in bytes on each device."""
        return compiled_lib.cost_of(self.compiled)[1]

    def as_text(self) -> str | None:
        """Returns the optimized HLO."""
        return self.compiled.as_text()

    def pack(self, portable: bool | Sequence[str] = False) -> artifact_lib.Artifact:
        """Returns what is stored of it: its original bytes where it has been stored before.

        Serializes and compresses at most once; takes about a tenth of the compile time, so it belongs in a commit.

        Args:
          portable: also its StableHLO, for its own platform or for those named. Where it cannot be had, the reason
            stands in the signature's `portable_absent`.

        Raises:
          NotSerializableError: it holds what plain data cannot describe.
        """
        with self._lock:
            if self._artifact is None:
                self._artifact = self._pack()
            if self._complete is not None:
                self._artifact = self._complete(self._artifact)
                self._complete = None
            signature = self._artifact.signature
            wanted = portable is not False or self._exported is not None
            if wanted and signature.portable is None and signature.portable_absent is None:
                platforms = None if isinstance(portable, bool) else tuple(portable)
                self._artifact = self._add_portable(self._artifact, platforms)
                self._lowering = (
                    None  # trace and module are large, and all that is kept of them is stored now
                )
            return self._artifact

    def _pack(self) -> artifact_lib.Artifact:
        lowering = self._lowering
        payload = executable_lib.make_payload(
            self.compiled,
            None if lowering is None else lowering.lowered,
            fresh=self._from_persistent_cache,
        )
        serialized = executable_lib.serialize(self.compiled, payload, self._environment)
        if lowering is None and self._complete is None:
            # Nothing says where a bare Compiled came from, and bytes of an executable that was itself loaded may
            # not run; here a failure costs only this function.
            executable_lib.LoadedProgram.load(serialized, self.devices)
        inputs = serialized.signature.inputs
        if self._placements is not None:
            inputs = tuple(
                msgspec.structs.replace(leaf, sharding=None) if placement is None else leaf
                for leaf, placement in zip(inputs, self._placements, strict=True)
            )
        signature = msgspec.structs.replace(
            serialized.signature,
            inputs=inputs,
            static=self._static,
            context=self._context,
            code=None if lowering is None else lowering.code,
            program=None if lowering is None else _program_digest(lowering.lowered),
        )
        shared = () if lowering is None else values.large_constants(lowering.traced)
        artifact = artifact_lib.pack(dataclasses.replace(serialized, signature=signature), shared)
        if lowering is None and self._complete is None:
            _bare_artifacts[self.compiled] = artifact
        return artifact

    def export(self, platforms: Sequence[str] | None = None) -> None:
        """Lowers for other platforms now, to be stored with the executable; see `jit(platforms=...)`."""
        self._exported = self._export(platforms)

    def _export(self, platforms: Sequence[str] | None) -> tuple[bytes | None, m.Absent | None]:
        """Exports from the trace that compiling made, under the context it was made in; says why where it cannot."""
        from orbax_aot import portable as portable_lib

        lowering = self._lowering
        if lowering is None:
            detail = (
                "a jax.stages.Compiled holds no StableHLO; save an AotFunction or an Executable"
            )
            return None, m.Absent(code="NOT_SERIALIZABLE", detail=detail)
        try:
            with context_lib.entered(lowering.context):
                return portable_lib.export_program(
                    lowering.traced, lowered=lowering.lowered, platforms=platforms
                ), None
        except portable_lib.PortableError as e:
            return None, m.Absent(code=e.obstacle.code, detail=e.obstacle.detail)
        except Exception as e:
            detail = f"{type(e).__name__}: {e}"[:300]
            return None, m.Absent(code="NOT_SERIALIZABLE", detail=detail)

    def _add_portable(
        self, artifact: artifact_lib.Artifact, platforms: Sequence[str] | None
    ) -> artifact_lib.Artifact:
        from orbax_aot import portable as portable_lib

        data, absent = self._exported or self._export(platforms)
        self._exported = None
        if data is None:
            return artifact.with_portable(None, absent)
        platforms = portable_lib.PortableProgram.parse(data).platforms
        lowering = self._lowering
        shared = () if lowering is None else values.large_constants(lowering.traced)
        return artifact.with_portable(data, platforms=platforms, shared=shared)


def _program_digest(lowered: jax.stages.Lowered) -> str:
    from orbax_aot.program import program_digest

    return program_digest(lowered)


@dataclasses.dataclass
class Call:
    """One call, taken apart as jit does: static arguments out, the others flat."""

    key: Any
    trace_key: Any  # as `key`, but for placements, which a trace does not depend on
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: list[Any]
    avals: tuple[Any, ...]
    placements: tuple[Any, ...]
    dynamic: tuple[tuple[Any, ...], dict[str, Any]]
    static: tuple[tuple[str, Any], ...]

    @functools.cached_property
    def in_tree(self) -> Any:
        return jax.tree.structure(self.dynamic)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return trees.argument_paths(self.dynamic)

    @functools.cached_property
    def context(self) -> dict[str, Any]:
        return config_lib.trace_context()

    @property
    def is_committed(self) -> bool:
        return any(p is not None for p in self.placements)

    @functools.cached_property
    def device(self) -> Any:
        """The one device that the arguments ask for: that of the committed ones, else the default."""
        for placement in self.placements:
            if placement is not None and len(placement.device_set) == 1:
                (device,) = placement.device_set
                return device
        return dispatch.default_device()


def take_apart(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: tuple[int, ...] = (),
    static_argnames: tuple[str, ...] = (),
) -> Call:
    """Takes a call apart. Raises `TypeError` where an argument is nothing jit takes."""
    signature, flat = trees_lib.parse_arguments(args, kwargs, static_argnums, static_argnames)
    avals = tuple(map(values.abstractify, flat))
    placements = tuple(_placement(x) for x in flat)
    positions = {n if n >= 0 else n + len(args) for n in static_argnums}
    dynamic = (
        tuple(a for i, a in enumerate(args) if i not in positions),
        {k: v for k, v in kwargs.items() if k not in static_argnames},
    )
    static = tuple(
        (str(i), describe_static(args[i])) for i in sorted(positions) if i < len(args)
    ) + tuple((k, describe_static(kwargs[k])) for k in sorted(kwargs) if k in static_argnames)
    trace_key = (signature, avals, config_lib.raw_trace_context())
    key = (*trace_key, placements)
    return Call(key, trace_key, args, kwargs, flat, avals, placements, dynamic, static)


def _placement(value: Any) -> Any:
    if isinstance(value, jax.Array) and dispatch.is_committed(value):
        return value.sharding
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding
    return None


def describe_static(value: Any) -> Any:
    """Returns a static argument as JSON data; what JSON cannot hold is named by type only."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe_static(v) for v in value]}
    return {"opaque": f"{type(value).__module__}:{type(value).__qualname__}"}


@dataclasses.dataclass
class Entry:
    """What a dispatcher runs: a compiled function, and how arguments and results are ordered for it."""

    compiled: jax.stages.Compiled
    result: trees.Result
    order: tuple[int, ...] | None = None
    first_run: crash.FirstRun | None = None

    def run(self, flat: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the result and, where C++ can take over, the fast-path data for the calls to come."""
        if self.first_run is not None and self.first_run.is_due:
            return self.first_run.watch(
                lambda: self._run(flat), lambda found: jax.block_until_ready(found[0])
            )
        return self._run(flat)

    def _run(self, flat: Sequence[Any]) -> tuple[Any, Any]:
        if self.order is not None or self.result.order is not None:
            ordered = flat if self.order is None else [flat[i] for i in self.order]
            return self.result.build(dispatch.call_flat(self.compiled, ordered)), None
        outputs = dispatch.call_flat(self.compiled, flat)
        result = self.result.build(outputs)
        try:
            fast = dispatch.make_fastpath(self.compiled, self.result.treedef, outputs, len(flat))
        except Exception as e:
            if not missing.is_missing(e):
                raise
            fast = None  # it has run, and its arguments may be gone: there is no second try
        return result, fast


class _CacheHits:
    """Tells whether a compilation on this thread came from JAX's persistent cache."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._registered = False
        self._lock = threading.Lock()

    def _register(self) -> None:
        with self._lock:
            if not self._registered:
                jax.monitoring.register_event_listener(self._listen)
                self._registered = True

    def _listen(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self._local.hits = getattr(self._local, "hits", 0) + 1

    def count(self) -> int:
        self._register()
        return getattr(self._local, "hits", 0)


_cache_hits = _CacheHits()


class DirectCall:
    """An object whose `__call__` is set on the instance, so that calling it runs no Python of ours.

    Python looks `__call__` up on the type and finds a slot there; what the slot holds is called directly. A method
    that passed the arguments on would cost 0.4 µs a call, a tenth of what `jax.jit` takes for one argument.
    """

    __slots__ = ("__call__", "__dict__", "__weakref__")


class AotFunction(DirectCall):
    """A jitted function that keeps one `Executable` for each call signature.

    Behaves as `jax.jit` of the same function does. Under `jax.vmap`, `jax.grad` or another jit, and where settings
    ask for it, calls fall through to jit. Safe to call from several threads.
    """

    def __init__(self, fun: Any, *, platforms: Sequence[str] | None = None, **jit_kwargs: Any):
        if isinstance(fun, AotFunction):
            if not jit_kwargs:
                jit_kwargs = fun._jit_kwargs
            platforms = platforms or fun._platforms
            fun = fun._given
        if isinstance(fun, jax.stages.Compiled | jax.stages.Lowered | Executable):
            raise UnsupportedFunctionError("Cannot lower a compiled jit function.")
        require_pure(fun)
        if isinstance(fun, staticmethod | classmethod) or not callable(fun):
            raise UnsupportedFunctionError(
                f"Unsupported type: {type(fun).__module__}.{type(fun).__qualname__}. "
                "Expected a function, a jitted function or an AotFunction."
            )
        self._given = fun
        self._platforms = None if platforms is None else tuple(platforms)
        self._jit_kwargs = jit_kwargs
        self._tracing = threading.local()
        self._entries: dict[Any, Entry] = {}
        self._executables: dict[Any, Executable] = {}
        self._restored: Any = None
        self._first_code: str | None = None
        self._traced_codes: dict[Any, m.Code] = {}
        self._lock = threading.RLock()
        self._warned_of_many = self._forgets = False
        self._lacking: str | None = None
        try:
            self._set_up(fun, jit_kwargs)
        except Exception as e:
            if not missing.is_missing(e):
                raise
            self._fun, self._jitted = fun, jax.jit(fun, **jit_kwargs)
            self._options, self._static = {}, ((), ())
            self._adopt_name()
            self.__call__ = self._jitted
            self._give_up(e)

    def _set_up(self, fun: Any, jit_kwargs: dict[str, Any]) -> None:
        """Jits `fun`, and takes the place of jit's own dispatch."""
        if dispatch.is_jitted(fun):
            if jit_kwargs:
                raise UnsupportedFunctionError(
                    f"Unsupported type: a jitted function together with {sorted(jit_kwargs)}; give these to "
                    "its own jax.jit."
                )
            self._fun = dispatch.wrapped_function(fun)
            self._jitted = dispatch.jit_again(self._watched(self._fun), fun)
        else:
            self._fun = fun
            self._jitted = jax.jit(self._watched(fun), **jit_kwargs)
        self._options = dispatch.options_of(self._jitted)
        self._static = dispatch.static_arguments_of(self._jitted)
        self._adopt_name()
        self.__call__ = dispatch.make_dispatcher(self._name, self._fun, self._miss, *self._static)

    def _adopt_name(self) -> None:
        functools.update_wrapper(cast(Any, self), self._fun)
        self._name = getattr(self, "__name__", None) or type(self._fun).__name__

    def _give_up(self, error: Exception) -> None:
        """Leaves all to jit from here on, where this JAX lacks what the package uses of it."""
        if self._lacking is not None:
            return
        self._lacking = (
            f"jax {jax.__version__} lacks what is needed: {type(error).__name__}: {error}"
        )
        logging.warning(
            "%s: runs as under jax.jit, and is not saved: %s", self._name, self._lacking
        )
        if self._restored is not None:
            self._restored.give_up(self._lacking)

    def _watched(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fun`, noting when it is really traced.

        jit keeps what it traced and shares it among all jits of one function. A wrapper of our own is traced
        afresh, so that a fingerprint taken around it is that of what was traced.
        """

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._tracing.ran = True
            return fun(*args, **kwargs)

        functools.update_wrapper(watched, fun)
        if not hasattr(fun, "__name__"):
            inner = fun.func if isinstance(fun, functools.partial) else type(fun)
            watched.__name__ = getattr(inner, "__name__", "fun")
        return watched

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(cast(Any, self), instance)

    def __repr__(self) -> str:
        return f"AotFunction({self._name}, {len(self.executables)} executables)"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The AotFunction {self._name!r} cannot be pickled; pickle the function it wraps, or save it with "
            "AotSave(fns={...})."
        )

    def __copy__(self) -> AotFunction:
        return self  # functions are not copied either

    def __deepcopy__(self, memo: Any) -> AotFunction:
        return self

    @property
    def executables(self) -> tuple[Executable, ...]:
        """What it has compiled or been restored with, oldest first."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], tuple[Executable, ...]]:
        """Notes what there is now, and returns what tells it: waiting for loads under way, which a save must not."""
        own = tuple(self._executables.values())
        restored = self._restored

        def tell() -> tuple[Executable, ...]:
            if self._lacking is not None and not own:
                raise NotSerializableError(f"{self._name}: {self._lacking}")
            loaded = () if restored is None else restored.executables()
            return (*loaded, *(e for e in own if e not in loaded))

        return tell

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(fun).trace`."""
        try:
            call = take_apart(args, kwargs, *self._static)
        except Exception:  # jit explains what it cannot take
            return self._jitted.trace(*args, **kwargs)
        return self._trace_call(call)[0]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fun).eval_shape`."""
        return self.trace(*args, **kwargs).out_info

    def compile(self, *args: Any, **kwargs: Any) -> Executable:
        """Compiles for arguments of the given types, and keeps the executable for calls of that signature.

        `args` and `kwargs` are arrays or `jax.ShapeDtypeStruct`s. Restored executables are used where they fit.
        """
        call = take_apart(args, kwargs, *self._static)
        with self._lock:
            self._find_entry(call)
            return self._executables[call.key]

    def clear(self) -> None:
        """Forgets all executables, restored ones too; the next call compiles."""
        with self._lock:
            self._entries.clear()
            self._executables.clear()
            self._traced_codes.clear()
            self._restored = None
            dispatch.clear(self.__call__)
            cast(Any, self._jitted).clear_cache()

    clear_cache = clear

    # -- dispatch ------------------------------------------------------------------------------------------------

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Answers the C++ dispatcher for a call it has not seen."""
        if self._lacking is None:
            try:
                return self._answer(args, kwargs)
            except Exception as e:
                if not missing.is_missing(e):
                    raise
                self._give_up(e)
        return self._jitted(*args, **kwargs), None, False

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
        if config_lib.tracing_is_forced() or not values.trace_state_is_clean():
            return self._jitted(*args, **kwargs), None, False
        try:
            call = take_apart(args, kwargs, *self._static)
        except Exception:  # jit explains what it cannot take
            return self._jitted(*args, **kwargs), None, False
        if any(map(values.is_tracer, call.flat)):
            return self._jitted(*args, **kwargs), None, False
        entry = self._entries.get(call.key)
        if entry is None:
            with self._lock:
                entry = self._entries.get(call.key) or self._find_entry(call)
        try:
            result, fast = entry.run(call.flat)
        except Exception as e:
            if dispatch.is_floating_point_error(e):
                dispatch.explain_floating_point_error(e, self._fun, args, kwargs)
            raise
        return result, fast, False

    def _find_entry(self, call: Call) -> Entry:
        """Returns what to run for a call not seen before: restored where that fits, else compiled."""
        if call.key in self._entries:
            return self._entries[call.key]
        entry = None
        if self._restored is not None:
            entry = self._restored.find_entry(call, self)
        if entry is None:
            entry = self.compile_call(call)
        self._entries[call.key] = entry
        self._limit_signatures()
        return entry

    def _limit_signatures(self) -> None:
        """Warns of many signatures, and forgets the oldest where there are too many. Runs under the lock."""
        count = len(self._entries)
        if count == _MANY_SIGNATURES and not self._warned_of_many:
            self._warned_of_many = True
            logging.warning(
                "%s: %d signatures so far, all kept and saved. If a shape changes with each call, pad it.",
                self._name,
                count,
            )
        while len(self._entries) > _MAX_SIGNATURES:
            if not self._forgets:
                self._forgets = True
                logging.warning(
                    "%s: more than %d signatures; the oldest are forgotten and no longer saved. If a shape changes "
                    "with each call, pad it.",
                    self._name,
                    _MAX_SIGNATURES,
                )
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._executables.pop(oldest, None)
            self._traced_codes.pop(oldest[:-1], None)

    def adopt(self, call: Call, executable: Executable) -> None:
        """Keeps a restored executable under the signature of a call."""
        self._executables[call.key] = executable

    def bind(self, restored: Any) -> None:
        """Takes over what a restore has for this function, for signatures not called yet."""
        with self._lock:
            self._restored = restored
        if self._lacking is not None:
            restored.give_up(self._lacking)

    def function_code(self) -> m.Code:
        """Returns the fingerprint of the function as it is now, without arguments."""
        return _as_code(
            _fingerprints().fingerprint_function(self._fun, self._fingerprint_options())
        )

    def call_code(self, call: Call) -> m.Code:
        """Returns the fingerprints of the function and of a call as they are now."""
        library = _fingerprints()
        options = self._fingerprint_options()
        function = library.fingerprint_function(self._fun, options)
        whole = library.fingerprint_call(self._fun, call.args, call.kwargs, options)
        return m.Code(
            fingerprint=function.digest,
            call=whole.digest,
            undecidable=tuple(dict.fromkeys((*function.undecidable, *whole.undecidable))),
        )

    def _fingerprint_options(self) -> dict[str, Any]:
        return {k: v for k, v in self._options.items() if k != "inline"}

    @property
    def compiler_options(self) -> dict[str, str]:
        return dispatch.compiler_options_of(self._jitted)

    def _trace_call(self, call: Call) -> tuple[jax.stages.Traced, m.Code]:
        """Traces a call on this thread; returns also the fingerprint of the code that was traced.

        The fingerprint is taken before and after. Where jit has the trace already, it is that of its own time.
        """
        before = self.call_code(call)
        self._tracing.ran = False
        traced = self._jitted.trace(*call.args, **call.kwargs)
        with self._lock:
            if not self._tracing.ran:
                why = ("was traced when no fingerprint was taken",)
                unseen = msgspec.structs.replace(before, undecidable=(*before.undecidable, *why))
                return traced, self._traced_codes.get(call.trace_key, unseen)
            after = self.call_code(call)
            if self._first_code is None:
                self._first_code = before.fingerprint
            why = ()
            if (before.fingerprint, before.call) != (after.fingerprint, after.call):
                why = ("changed while it was traced",)
            elif self._first_code != before.fingerprint:
                # Parts that are jitted themselves may have been traced before the change.
                why = ("changed in this process after it was first traced",)
            code = msgspec.structs.replace(after, undecidable=(*after.undecidable, *why))
            self._traced_codes[call.trace_key] = code
            return traced, code

    def lower_call(self, call: Call) -> Lowering:
        """Traces and lowers a call on this thread, with fingerprints taken around the trace."""
        start = time.perf_counter()
        traced, code = self._trace_call(call)
        lowered = traced.lower()
        secs = time.perf_counter() - start
        return Lowering(traced, lowered, code, context_lib.ThreadContext(), secs)

    def compile_call(self, call: Call, lowering: Lowering | None = None) -> Entry:
        """Compiles a call, through JAX's persistent cache as jit does, and keeps the executable."""
        lowering = lowering or self.lower_call(call)
        environment = topology.describe_environment(
            compiled_lib.backend_of_lowered(lowering.lowered), self.compiler_options
        )
        hits = _cache_hits.count()
        start = time.perf_counter()
        compiled = lowering.lowered.compile()
        secs = time.perf_counter() - start
        executable = self._executables[call.key] = Executable(
            compiled,
            name=self._name,
            origin=Origin("compiled", lowering.secs + secs),
            lowering=lowering,
            static=call.static,
            context=call.context,
            placements=call.placements,
            environment=environment,
            from_persistent_cache=_cache_hits.count() > hits,
        )
        if self._platforms is not None:
            executable.export(self._platforms)
        return Entry(compiled, trees.Result(compiled.out_tree, None))


def _as_code(fingerprint: Any) -> m.Code:
    return m.Code(fingerprint=fingerprint.digest, call="", undecidable=fingerprint.undecidable)


def _fingerprints() -> Any:
    from orbax_aot import fingerprint

    return fingerprint


# What is stored of bare `Compiled`s, so that saving one again costs nothing.
_bare_artifacts: weakref.WeakKeyDictionary[jax.stages.Compiled, artifact_lib.Artifact] = (
    weakref.WeakKeyDictionary()
)


def executable_of(compiled: jax.stages.Compiled, name: str) -> Executable:
    """Returns an `Executable` that stands for a bare `Compiled`, which has no StableHLO and no code."""
    return Executable(compiled, name=name, artifact=_bare_artifacts.get(compiled))

"""Programs as StableHLO: exported from a trace, repartitioned to another mesh, compiled there.

An exported program says what to compute on whole arrays, and how to lay those out over a mesh of
named axes. Only the layout depends on the sizes of the axes, so changing the sizes changes where
the work is done, never the result. Where that is not so, `PortableProgram.find_obstacle` says why.
"""

# `jax.Device` is a variable to pyright.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core

from orbax_aot._jax import export as export_door
from orbax_aot._jax import mlir
from orbax_aot.errors import AotError

# Custom calls that run Python, or another framework, on the host.
_HOST_CALL_WORDS = ("callback", "py_func", "tf.call_tf_function", "CustomSPMDPartitioning")
# Custom calls that carry a kernel of their own, which may touch any memory of the device.
_KERNEL_CALLS = frozenset({"tpu_custom_call", "mosaic_gpu_v2"})
_GPU_PLATFORMS = ("cuda", "rocm")
_WIDE_KINDS = ("int64", "uint64", "float64", "complex128")


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why a program cannot be exported, repartitioned or trusted.

    Attributes:
        code: the name of a `ReasonCode`.
        detail: a sentence: what, where, and what to do.
    """

    code: str
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class PortableError(AotError):
    """A program cannot be exported, read or compiled; `obstacle` says why."""

    def __init__(self, obstacle: Obstacle):
        super().__init__(str(obstacle))
        self.obstacle = obstacle


# --- exporting ---------------------------------------------------------------------------------


def export_program(
    traced: jax.stages.Traced,
    *,
    lowered: jax.stages.Lowered | None = None,
    platforms: Sequence[str] | None = None,
) -> bytes:
    """Exports a traced function as StableHLO, taking and returning flat tuples of arrays.

    Never traces. Lowers once, or not at all where `lowered` is for the one platform asked for. Any
    thread may call this that has the config and mesh contexts of the thread that traced.

    Args:
        traced: what `jax.jit(…).trace(…)` returns.
        lowered: the same, lowered, if that has been done; left as it is.
        platforms: names as `jax.export` takes them, such as `("cpu", "tpu", "cuda")`. By default
            the platform of `lowered`, else that of the default backend.

    Returns:
        What `PortableProgram.parse` reads, and `jax.export.deserialize` too.

    Raises:
        PortableError: the function calls back into Python, has other effects, uses what has no
            stable form or no form on one of the platforms, or cannot be described.
    """
    wanted = _wanted_platforms(lowered, platforms)
    _require_exportable(traced)
    try:
        exported = _export(traced, lowered, wanted)
        if exported.ordered_effects or exported.unordered_effects:
            raise PortableError(_effects_obstacle(traced))
        return export_door.serialize(export_door.flatten(exported))
    except PortableError:
        raise
    # Exporting runs lowering rules of any library, so any exception can come out of it.
    except Exception as e:
        raise PortableError(_export_obstacle(e, wanted)) from e


def _wanted_platforms(
    lowered: jax.stages.Lowered | None, platforms: Sequence[str] | None
) -> tuple[str, ...]:
    if platforms is not None:
        return tuple(dict.fromkeys(platforms))
    if lowered is not None:
        return export_door.lowered_platforms(lowered)
    return (jax.export.default_export_platform(),)


def _require_exportable(traced: jax.stages.Traced) -> None:
    """Raises for what exporting would refuse late or serialize wrongly."""
    avals = [*traced.jaxpr.in_avals, *traced.jaxpr.out_avals]
    if len(avals) > export_door.MAX_ARRAYS:
        raise _not_serializable(f"{len(avals)} inputs and outputs are more than an export holds")
    if export_door.closes_over_references(traced):
        raise _not_serializable("the function closes over a mutable array")
    for aval in avals:
        if not export_door.is_plain_array(aval):
            raise _not_serializable(f"an argument or output is no array but {aval}")
        if not export_door.has_constant_shape(aval):
            raise _not_serializable(f"the shape of {aval} is not constant")


def _export(
    traced: jax.stages.Traced, lowered: jax.stages.Lowered | None, platforms: tuple[str, ...]
) -> export_door.Exported:
    if (
        lowered is not None
        and export_door.lowered_platforms(lowered) == platforms
        and not export_door.holds_constants_as_arguments(lowered)
    ):
        if export_door.host_callback_count(lowered):
            raise PortableError(_effects_obstacle(traced))
        try:
            return export_door.export_lowered(traced, lowered)
        except ValueError:
            # Lowering for execution may use custom calls too new to have a guarantee, where
            # lowering for export would take an older form.
            pass
    return export_door.export_traced(traced, platforms)


def _not_serializable(problem: str) -> PortableError:
    return PortableError(Obstacle("NOT_SERIALIZABLE", f"No StableHLO was stored: {problem}."))


def _effects_obstacle(traced: jax.stages.Traced) -> Obstacle:
    effects = sorted(str(e) for e in traced.jaxpr.effects) or ["host callbacks"]
    return Obstacle(
        "NOT_SERIALIZABLE",
        f"No StableHLO was stored: the function has effects outside the program "
        f"({', '.join(effects)}). Remove callbacks and debug prints to store it.",
    )


def _export_obstacle(error: Exception, platforms: tuple[str, ...]) -> Obstacle:
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        message = f"jax.export has no form for {message}"
    if "host_callbacks" in message or "callback" in message.lower():
        return Obstacle(
            "NOT_SERIALIZABLE",
            "No StableHLO was stored: the function calls back into Python. "
            f"Remove callbacks and debug prints to store it. ({_shortened(message)})",
        )
    if "not found for platform" in message or "on platform" in message.lower():
        return Obstacle(
            "PLATFORM",
            f"No StableHLO was stored: something in the function does not exist on one of the "
            f"platforms {', '.join(platforms)}. Ask for fewer platforms. ({_shortened(message)})",
        )
    return Obstacle("NOT_SERIALIZABLE", f"No StableHLO was stored: {_shortened(message)}")


def _shortened(message: str, limit: int = 400) -> str:
    return message if len(message) <= limit else f"{message[:limit]}…"


# --- reading, checking, compiling --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PortableProgram:
    """An exported program, parsed: what it takes and returns, and where it can run.

    Attributes:
        platforms: what it was exported for.
        nr_devices: how many devices it was partitioned over.
        in_avals: the inputs, in order; weak types included.
        out_avals: the outputs, in order.
        mesh_axes: names and sizes of the axes of its mesh, in order; `None` without a mesh.
        custom_calls: targets of custom calls, sorted.
        host_calls: those of them that run Python or another framework on the host, and
            operations that exchange data with the host.
        unknown_calls: those of the custom calls that are not JAX's own stable ones; they can be
            anything that is registered in the process.
    """

    platforms: tuple[str, ...]
    nr_devices: int
    in_avals: tuple[core.ShapedArray, ...]
    out_avals: tuple[core.ShapedArray, ...]
    mesh_axes: Mapping[str, int] | None
    custom_calls: tuple[str, ...]
    host_calls: tuple[str, ...]
    unknown_calls: tuple[str, ...]
    _exported: export_door.Exported = dataclasses.field(repr=False)
    _facts: mlir.ModuleFacts = dataclasses.field(repr=False)

    @property
    def outside_calls(self) -> tuple[str, ...]:
        """Calls out of StableHLO: to the host, to whatever is registered in the process, and kernels in it."""
        kernels = {*self.custom_calls} & _KERNEL_CALLS
        return tuple(sorted({*self.host_calls, *self.unknown_calls, *kernels}))

    @classmethod
    def parse(cls, data: bytes) -> PortableProgram:
        """Reads what `export_program` returned; compiles nothing.

        Damaged bytes are refused before native code sees them. Bytes made to harm, with a
        checksum that fits, do reach MLIR's reader, which is not safe against them.

        Raises:
            PortableError: `CORRUPT`, or `JAX_VERSION` where a newer JAX wrote the bytes.
        """
        try:
            exported = export_door.parse(data)
            with export_door.opened_module(exported) as module:
                facts = mlir.describe_module(module)
        except export_door.NewerExportError as e:
            detail = f"The StableHLO was stored by a newer JAX ({e}). Update jax and jaxlib."
            raise PortableError(Obstacle("JAX_VERSION", detail)) from e
        # What MLIR raises for a module it cannot read differs between its versions.
        except Exception as e:
            detail = f"The StableHLO cannot be read ({_shortened(str(e))}). Save this step again."
            raise PortableError(Obstacle("CORRUPT", detail)) from e
        host_calls = [t for t in facts.custom_calls if any(w in t for w in _HOST_CALL_WORDS)]
        return cls(
            platforms=tuple(exported.platforms),
            nr_devices=exported.nr_devices,
            in_avals=tuple(exported.in_avals),
            out_avals=tuple(exported.out_avals),
            mesh_axes=_mesh_axes(exported, facts),
            custom_calls=facts.custom_calls,
            host_calls=(*host_calls, *facts.host_transfers),
            unknown_calls=tuple(sorted({*facts.custom_calls} - export_door.stable_calls())),
            _exported=exported,
            _facts=facts,
        )

    def find_obstacle(self, mesh_shape: Mapping[str, int] | None, platform: str) -> Obstacle | None:
        """Returns why this program cannot run on a mesh, or `None` if it can.

        Everything that could end in a wrong result or a crash is found here, from the program
        alone, before anything is compiled.

        Args:
            mesh_shape: names and sizes of the axes, in order; `None` is one device with no mesh.
            platform: of the devices, as `jax.Device.platform` or `jax.export` names it.
        """
        return (
            self._find_platform_obstacle(platform)
            or self._find_host_obstacle()
            or self._find_config_obstacle()
            or self._find_mesh_obstacle(dict(mesh_shape or {}))
        )

    def compile(
        self,
        mesh: jax.sharding.Mesh | None,
        devices: Sequence[jax.Device] = (),
        *,
        donated: Sequence[int] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ) -> jax.stages.Compiled:
        """Compiles the program for a mesh, repartitioning it where the mesh differs.

        Args:
            mesh: the mesh to run on. Without one the program runs on `devices[0]`, or on all
                `devices` in their order where there are as many as its own mesh has.
            devices: where to run without a mesh.
            donated: indices of inputs whose buffers may be reused.
            compiler_options: passed to the compiler.

        Returns:
            A function of the inputs as positional arguments, returning a tuple of the outputs.
            Inputs and outputs are sharded on `mesh` as the program says; what it leaves open
            stays open.

        Raises:
            PortableError: `find_obstacle` found something, or the compiler failed.
        """
        mesh = mesh if mesh is not None else self._own_mesh(devices)
        device = mesh.devices.flat[0] if mesh is not None else _first(devices)
        mesh_shape = dict(mesh.shape) if mesh is not None else None
        if obstacle := self.find_obstacle(mesh_shape, device.platform):
            raise PortableError(obstacle)
        if mesh is None:
            placement: _Placement = _OneDevice(device)
        else:
            placement = _OnMesh(mesh)
        try:
            return self._compile_on(placement, tuple(donated), compiler_options)
        # The compiler reports what it cannot do in many ways; all mean that this module is of
        # no use here.
        except Exception as e:
            detail = f"Compiling the stored StableHLO failed ({_shortened(str(e))})."
            raise PortableError(Obstacle("NEEDS_SOURCE", detail)) from e

    def as_text(self) -> str:
        """Returns the StableHLO as text."""
        return self._exported.mlir_module()

    # --- obstacles ---

    def _find_platform_obstacle(self, platform: str) -> Obstacle | None:
        accepted = _GPU_PLATFORMS if platform == "gpu" else (platform,)
        if any(name in self.platforms for name in accepted):
            return None
        return Obstacle(
            "PLATFORM",
            f"The StableHLO is for {', '.join(self.platforms)}, not for {platform}. "
            f"Save with portable=({', '.join(map(repr, (*self.platforms, platform)))}).",
        )

    def _find_host_obstacle(self) -> Obstacle | None:
        if not self.host_calls:
            return None
        return Obstacle(
            "NEEDS_SOURCE",
            f"The StableHLO calls into the host ({', '.join(self.host_calls)}), where there is "
            "nothing to call. Pass the live function.",
        )

    def _find_config_obstacle(self) -> Obstacle | None:
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        for kind, avals in (("input", self.in_avals), ("output", self.out_avals)):
            for i, aval in enumerate(avals):
                if str(aval.dtype) in _WIDE_KINDS:
                    return Obstacle(
                        "JAX_CONFIG",
                        f"{kind.capitalize()} {i} is {aval.str_short()}, and jax_enable_x64 is "
                        "off here. Switch it on.",
                    )
        return None

    def _find_mesh_obstacle(self, mesh_shape: dict[str, int]) -> Obstacle | None:
        if self._facts.old_shardings:
            return _needs_source("its shardings name no axes (Shardy was off when it was saved)")
        if list(mesh_shape.items()) == list((self.mesh_axes or {}).items()):
            return None
        return (
            self._find_renamed_axes(mesh_shape)
            or self._find_fixed_layout()
            or self._find_indivisible_size(mesh_shape)
            or _find_unsafe_sizes(mesh_shape)
        )

    def _find_renamed_axes(self, mesh_shape: dict[str, int]) -> Obstacle | None:
        saved = self.mesh_axes or {}
        missing = [name for name in saved if name not in mesh_shape]
        unknown = [name for name in mesh_shape if name not in saved]
        # An axis that is missing has size 1; over one that is new, everything is replicated. Both
        # at once would run correctly too, but most likely an axis has got another name.
        if not (missing and unknown):
            return None
        return Obstacle(
            "MESH_SHAPE",
            f"The program's mesh has axes {', '.join(saved)}, this one {', '.join(mesh_shape)}: "
            f"{', '.join(missing)} missing, {', '.join(unknown)} new. Name the axes alike.",
        )

    def _find_fixed_layout(self) -> Obstacle | None:
        facts = self._facts
        if facts.per_device:
            return _needs_source(
                f"it computes device by device ({', '.join(facts.per_device)}, as shard_map does)"
            )
        if facts.reordered:
            return _needs_source("one of its meshes has its devices in another order")
        if facts.split_axes:
            return _needs_source("one of its shardings uses a part of a mesh axis")
        if facts.partial_sums or self._has_partial_sums():
            return _needs_source("it takes, makes or keeps sums that are not yet reduced")
        if len(_all_meshes(self._exported, facts)) > 1:
            return _needs_source("it uses several meshes")
        return None

    def _has_partial_sums(self) -> bool:
        inputs, outputs = export_door.named_shardings(self._exported)
        named = [s.spec for s in (*inputs, *outputs) if s is not None]
        return any(spec.unreduced or spec.reduced for spec in named)

    def _find_indivisible_size(self, mesh_shape: dict[str, int]) -> Obstacle | None:
        inputs, outputs = export_door.named_shardings(self._exported)
        for kind, avals, shardings in (
            ("input", self.in_avals, inputs),
            ("output", self.out_avals, outputs),
        ):
            for i, (aval, sharding) in enumerate(zip(avals, shardings, strict=True)):
                if sharding is None:
                    continue
                for dimension, axes in enumerate(_axes_by_dimension(sharding.spec)):
                    parts = math.prod(mesh_shape.get(axis, 1) for axis in axes)
                    if aval.shape[dimension] % parts:
                        return Obstacle(
                            "MESH_SHAPE",
                            f"Dimension {dimension} of {kind} {i}, {aval.str_short()}, is split "
                            f"over {' x '.join(axes)}, and {aval.shape[dimension]} does not divide "
                            f"into {parts} parts. Choose other sizes for the mesh.",
                        )
        return None

    # --- compiling ---

    def _own_mesh(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh | None:
        """Returns the program's own mesh on `devices`, where they are as many and several."""
        if self.mesh_axes is None or len(devices) != self.nr_devices or len(devices) == 1:
            return None
        shape = tuple(self.mesh_axes.values())
        return jax.sharding.Mesh(np.array(devices).reshape(shape), tuple(self.mesh_axes))

    def _compile_on(
        self,
        placement: _Placement,
        donated: tuple[int, ...],
        compiler_options: Mapping[str, Any] | None,
    ) -> jax.stages.Compiled:
        inputs, outputs = export_door.named_shardings(self._exported)
        axes = placement.axes()
        exported = export_door.replace_module(
            self._exported,
            self._repartitioned_module(axes),
            nr_devices=math.prod(size for _, size in axes),
            in_shardings=[placement.abstract(s) for s in inputs],
            out_shardings=[placement.abstract(s) for s in outputs],
        )

        def program(*flat: Any) -> Any:
            return exported.call(*flat)

        program.__name__ = program.__qualname__ = exported.fun_name
        jitted = jax.jit(
            program,
            in_shardings=tuple(placement.concrete(s) for s in inputs),
            out_shardings=tuple(placement.concrete(s) for s in outputs),
            donate_argnums=donated,
        )
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in self.in_avals
        ]
        with placement.context():
            lowered = jitted.lower(*arguments)
        return lowered.compile(dict(compiler_options) if compiler_options else None)

    def _repartitioned_module(self, axes: Sequence[tuple[str, int]]) -> bytes:
        if list(axes) == list((self.mesh_axes or {}).items()):
            return self._exported.mlir_module_serialized
        with export_door.opened_module(self._exported) as module:
            mlir.resize_meshes(module, axes)
            return mlir.to_bytecode(module)


# --- where it runs -----------------------------------------------------------------------------


class _OnMesh:
    """Shardings over a mesh; axes it does not have are left out of them."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh

    def axes(self) -> list[tuple[str, int]]:
        return list(self._mesh.shape.items())

    def context(self) -> contextlib.AbstractContextManager[Any]:
        # Where all shardings are left open, only the context says which devices to use.
        return jax.set_mesh(self._mesh)

    def concrete(self, saved: Any) -> jax.sharding.NamedSharding | None:
        return self._moved(saved, self._mesh)

    def abstract(self, saved: Any) -> jax.sharding.NamedSharding | None:
        return self._moved(saved, self._mesh.abstract_mesh)

    def _moved(self, saved: Any, mesh: Any) -> jax.sharding.NamedSharding | None:
        if saved is None:
            return None
        parts = [
            tuple(axis for axis in axes if axis in self._mesh.shape) or None
            for axes in _axes_by_dimension(saved.spec)
        ]
        kept = {
            "reduced": frozenset(saved.spec.reduced),
            "unreduced": frozenset(saved.spec.unreduced),
        }
        spec = jax.sharding.PartitionSpec(*parts, **kept)
        return jax.sharding.NamedSharding(mesh, spec, memory_kind=_memory_kind(saved))


class _OneDevice:
    """One device and no mesh."""

    def __init__(self, device: jax.Device):
        self._device = device

    def axes(self) -> list[tuple[str, int]]:
        return []

    def context(self) -> contextlib.AbstractContextManager[Any]:
        # The caller may be within a mesh of other devices, which would contradict this one.
        return jax.set_mesh(jax.sharding.Mesh(np.array([self._device]), ("device",)))

    def concrete(self, saved: Any) -> jax.sharding.SingleDeviceSharding:
        kind = None if saved is None else _memory_kind(saved)
        return jax.sharding.SingleDeviceSharding(self._device, memory_kind=kind)

    def abstract(self, saved: Any) -> None:
        return None


_Placement = _OnMesh | _OneDevice


def _memory_kind(sharding: Any) -> str | None:
    """Returns the memory a sharding asks for; `None` for a device's own, whatever its name."""
    return None if sharding.memory_kind == "device" else sharding.memory_kind


def _needs_source(problem: str) -> Obstacle:
    return Obstacle(
        "NEEDS_SOURCE",
        f"The StableHLO cannot be moved to another mesh: {problem}. Pass the live function, or "
        "restore on a mesh of the saved shape.",
    )


def _find_unsafe_sizes(mesh_shape: Mapping[str, int]) -> Obstacle | None:
    """Returns an obstacle for sizes on which XLA's partitioner can end the process.

    Going from a sharding over some axes to one over others, it cuts the one into the other, and
    fails a check where neither product of sizes divides the other: axes of 2 and 3, or of 2, 2 and
    6 (seen on jax 0.11.2 and 0.12.0.1, with plain `jax.jit` too). Which programs it hits cannot be
    told from outside. Powers of one number are safe.
    """
    products = {1}
    for size in mesh_shape.values():
        products |= {product * size for product in products}
    ordered = sorted(products)
    if all(larger % smaller == 0 for smaller, larger in itertools.pairwise(ordered)):
        return None
    return Obstacle(
        "MESH_SHAPE",
        f"The sizes of the axes {_described(mesh_shape)} do not divide one another, and XLA can "
        "crash moving a program to such a mesh. Use powers of two.",
    )


def _described(mesh_shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh_shape.items())


def _first(devices: Sequence[jax.Device]) -> jax.Device:
    if not devices:
        raise PortableError(Obstacle("DEVICE_COUNT", "There is neither a mesh nor a device."))
    return devices[0]


def _axes_by_dimension(spec: jax.sharding.PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the names of the mesh axes that each dimension is split over."""
    return [
        () if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec
    ]


def _all_meshes(
    exported: export_door.Exported, facts: mlir.ModuleFacts
) -> list[tuple[tuple[str, int], ...]]:
    """Returns the meshes that the program names, those of its inputs and outputs first."""
    inputs, outputs = export_door.named_shardings(exported)
    named = [tuple(s.mesh.shape.items()) for s in (*inputs, *outputs) if s is not None]
    return [axes for axes in dict.fromkeys((*named, *facts.meshes)) if axes]


def _mesh_axes(exported: export_door.Exported, facts: mlir.ModuleFacts) -> Mapping[str, int] | None:
    meshes = _all_meshes(exported, facts)
    return dict(meshes[0]) if meshes else None

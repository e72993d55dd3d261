"""StableHLO modules through the MLIR bindings that JAX bundles.

Everything here was seen on jax 0.10.2, 0.11.2 and 0.12.0.1. Modules are handed over as bytes: an
`ir.Module` belongs to the thread-local or cached context that made it, and editing it in place
would corrupt what JAX keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib.mlir import ir, passmanager  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import sdy

Module = ir.Module
Operation = ir.Operation

_PARTITIONS = "mhlo.num_partitions"
_ARG_SHARDING = "sdy.sharding"
_STABLEHLO_MESH = "stablehlo.mesh"
_RESULT_INFO = "jax.result_info"
_ATTRIBUTE_FIELDS = ("arg_attrs", "res_attrs")


def to_bytecode(module: ir.Module) -> bytes:
    """Serializes `module` as MLIR bytecode; equal modules gave equal bytes, over processes too."""
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


@contextlib.contextmanager
def parsed(code: bytes | str) -> Iterator[ir.Module]:
    """Parses MLIR bytecode or text into a private copy, whose context is entered meanwhile."""
    with opened(lambda: ir.Module.parse(code)) as module:
        yield module


@contextlib.contextmanager
def opened(read: Callable[[], ir.Module]) -> Iterator[ir.Module]:
    """Yields the module that `read` makes, in a context for JAX's dialects, entered meanwhile."""
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        yield read()


def walk(module: ir.Module, visit: Callable[[ir.Operation], None]) -> None:
    """Calls `visit` with each operation of `module`, nested ones included."""

    def step(operation: Any) -> Any:
        visit(operation.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(step)


def run_passes(module: ir.Module, passes: str) -> None:
    """Runs a comma-separated list of module passes on `module`, in place."""
    passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)


def functions(module: ir.Module) -> list[ir.Operation]:
    """Returns the functions of `module`, in their order."""
    return [op.operation for op in module.body.operations if op.operation.name == "func.func"]


def find_function(module: ir.Module, name: str) -> ir.Operation | None:
    """Returns the function called `name`, or `None`."""
    return next((f for f in functions(module) if symbol_name(f) == name), None)


def symbol_name(operation: ir.Operation) -> str:
    """Returns the symbol that a function or a mesh defines."""
    return ir.StringAttr(operation.attributes["sym_name"]).value


def partitions(module: ir.Module) -> int:
    """Returns the number of devices that `module` is partitioned over."""
    attributes = module.operation.attributes
    return ir.IntegerAttr(attributes[_PARTITIONS]).value if _PARTITIONS in attributes else 1


# --- what a program digest leaves out ---------------------------------------------------------


def strip_names(module: ir.Module) -> None:
    """Removes locations, the module's name and names of results; numbers private functions."""
    run_passes(module, "strip-debuginfo")
    if "sym_name" in module.operation.attributes:
        del module.operation.attributes["sym_name"]
    for number, function in enumerate(functions(module)):
        for field in _ATTRIBUTE_FIELDS:
            _drop_attributes(function, field, _RESULT_INFO)
        name = symbol_name(function)
        if name != "main":
            numbered = f"orbax_aot.{number}"
            ir.SymbolTable.set_symbol_name(function, numbered)
            ir.SymbolTable.replace_all_symbol_uses(name, numbered, module.operation)


def strip_commitment(module: ir.Module) -> None:
    """Removes shardings that say only that an array is committed.

    A sharding over a mesh without axes, in a program for one device, and the replication of a
    scalar: nothing else is possible there. They stand at inputs and outputs, and for random keys
    also inside the program. What stays is no longer a module that verifies: the
    meshes without axes are gone, while a sharding elsewhere may still name one.
    """
    main = find_function(module, "main")
    meshes = {
        symbol_name(op.operation): sdy.MeshAttr(op.operation.attributes["mesh"])
        for op in module.body.operations
        if op.operation.name == "sdy.mesh"
    }
    empty = {n for n, mesh in meshes.items() if not len(mesh.axes) and not len(mesh.device_ids)}
    one_device = partitions(module) == 1

    def says_nothing(attribute: ir.Attribute) -> bool:
        sharding = sdy.TensorShardingAttr(attribute)
        if len(sharding.unreduced_axes):
            return False
        if not len(sharding.dimension_shardings):
            return True
        return one_device and _mesh_name(sharding) in empty

    if main is not None:
        for field in _ATTRIBUTE_FIELDS:
            _drop_attributes(main, field, _ARG_SHARDING, says_nothing)
    _drop_constraints(module, says_nothing)
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh" and symbol_name(op.operation) in empty:
            op.operation.erase()


def _drop_constraints(module: ir.Module, condition: Callable[[ir.Attribute], bool]) -> None:
    """Drops sharding constraints where `condition` holds of the sharding."""
    found: list[ir.Operation] = []

    def look(operation: ir.Operation) -> None:
        is_constraint = operation.name == "sdy.sharding_constraint"
        if is_constraint and condition(operation.attributes["sharding"]):
            found.append(operation)

    walk(module, look)
    for operation in found:
        # Oldest use first, as if the constraint had never been: bytecode holds the order of uses.
        for use in reversed(list(operation.result.uses)):
            use.owner.operands[use.operand_number] = operation.operands[0]
        operation.erase()


def _mesh_name(sharding: Any) -> str | None:
    """Returns the symbol of the mesh a sharding refers to; `None` where the mesh is inlined."""
    reference = sharding.mesh_or_ref
    return reference.value if isinstance(reference, ir.FlatSymbolRefAttr) else None


def _drop_attributes(
    function: ir.Operation,
    field: str,
    name: str,
    condition: Callable[[ir.Attribute], bool] = lambda attribute: True,
) -> None:
    """Drops attribute `name` of a function's arguments or results where `condition` holds."""
    if field not in function.attributes:
        return
    kept = []
    for entry in ir.ArrayAttr(function.attributes[field]):
        attributes = {named.name: named.attr for named in ir.DictAttr(entry)}
        if name in attributes and condition(attributes[name]):
            del attributes[name]
        kept.append(ir.DictAttr.get(attributes))
    if any(len(entry) for entry in kept):
        function.attributes[field] = ir.ArrayAttr.get(kept)
    else:
        # No attributes at all and a list of empty ones mean the same; keep one form.
        del function.attributes[field]


# --- what a module says ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModuleFacts:
    """What decides whether a module can run on another mesh.

    Attributes:
        meshes: the named meshes, as axes in order; those without axes are left out.
        custom_calls: targets of custom calls, sorted.
        per_device: operations whose meaning depends on the number or order of devices, sorted.
        host_transfers: operations that exchange data with the host, sorted.
        reordered: a mesh lists its devices in an order of its own.
        split_axes: a sharding uses a part of a mesh axis.
        partial_sums: a sharding leaves sums over an axis undone.
        old_shardings: shardings in the form before Shardy, which name no axes.
    """

    meshes: tuple[tuple[tuple[str, int], ...], ...]
    custom_calls: tuple[str, ...]
    per_device: tuple[str, ...]
    host_transfers: tuple[str, ...]
    reordered: bool
    split_axes: bool
    partial_sums: bool
    old_shardings: bool


_PER_DEVICE = frozenset(
    {
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_broadcast",
        "stablehlo.collective_permute",
        "stablehlo.cross-replica-sum",
        "stablehlo.partition_id",
        "stablehlo.reduce_scatter",
        "stablehlo.replica_id",
    }
)
_PER_DEVICE_CALLS = ("SPMDFullToShardShape", "SPMDShardToFullShape")
_PER_DEVICE_CALL_PREFIX = "xla.sdy."
_HOST_TRANSFERS = ("stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed")
# Operations of Shardy on whole arrays; all others of its operations are on the shards of a device.
_SHARDY_WITHOUT_DEVICES = frozenset(
    {
        "sdy.mesh",
        "sdy.named_computation",
        "sdy.propagation_barrier",
        "sdy.reshard",
        "sdy.return",
        "sdy.sharding_constraint",
        "sdy.sharding_group",
    }
)
_SHARDINGS = (_ARG_SHARDING, "sharding", "in_shardings", "out_shardings")
_OLD_SHARDING = "mhlo.sharding"


def describe_module(module: ir.Module) -> ModuleFacts:
    """Walks `module` once and returns what decides whether it can run on another mesh."""
    facts = _FactsCollector()
    walk(module, facts.visit)
    return ModuleFacts(
        meshes=tuple(facts.meshes),
        custom_calls=tuple(sorted(facts.custom_calls)),
        per_device=tuple(sorted(facts.per_device)),
        host_transfers=tuple(sorted(facts.host_transfers)),
        reordered=facts.reordered,
        split_axes=facts.split_axes,
        partial_sums=facts.partial_sums,
        old_shardings=facts.old_shardings,
    )


def _is_per_device(name: str) -> bool:
    return name in _PER_DEVICE or (name.startswith("sdy.") and name not in _SHARDY_WITHOUT_DEVICES)


class _FactsCollector:
    """Gathers the facts of a module, one operation at a time."""

    def __init__(self) -> None:
        self.meshes: dict[tuple[tuple[str, int], ...], None] = {}
        self.custom_calls: set[str] = set()
        self.per_device: set[str] = set()
        self.host_transfers: set[str] = set()
        self.reordered = self.split_axes = self.partial_sums = self.old_shardings = False

    def visit(self, operation: ir.Operation) -> None:
        name, attributes = operation.name, operation.attributes
        if name == "sdy.mesh":
            self._see_mesh(attributes["mesh"])
        elif name == "func.func":
            self._see_function(operation)
        elif name == "stablehlo.custom_call":
            self._see_custom_call(ir.StringAttr(attributes["call_target_name"]).value)
        elif _is_per_device(name):
            self.per_device.add(name)
        elif name in _HOST_TRANSFERS:
            self.host_transfers.add(name)
        for key in _SHARDINGS:
            if key in attributes:
                self._see_sharding(attributes[key])
        self.old_shardings |= _OLD_SHARDING in attributes

    def _see_function(self, function: ir.Operation) -> None:
        if "manual_computation_body" in symbol_name(function):
            self.per_device.add("sdy.manual_computation")
        for field in _ATTRIBUTE_FIELDS:
            if field not in function.attributes:
                continue
            for entry in map(ir.DictAttr, ir.ArrayAttr(function.attributes[field])):
                if _ARG_SHARDING in entry:
                    self._see_sharding(entry[_ARG_SHARDING])
                self.old_shardings |= _OLD_SHARDING in entry

    def _see_custom_call(self, target: str) -> None:
        self.custom_calls.add(target)
        if target in _PER_DEVICE_CALLS or target.startswith(_PER_DEVICE_CALL_PREFIX):
            self.per_device.add(target)

    def _see_mesh(self, attribute: ir.Attribute) -> None:
        mesh = sdy.MeshAttr(attribute)
        axes = tuple((axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes))
        if axes:
            self.meshes[axes] = None
            self.reordered |= bool(len(mesh.device_ids))

    def _see_sharding(self, attribute: ir.Attribute) -> None:
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            for sharding in sdy.TensorShardingPerValueAttr(attribute).shardings:
                self._see_sharding(sharding)
            return
        if not sdy.TensorShardingAttr.isinstance(attribute):
            return
        sharding = sdy.TensorShardingAttr(attribute)
        if not isinstance(sharding.mesh_or_ref, ir.FlatSymbolRefAttr):
            self._see_mesh(sharding.mesh_or_ref)
        self.partial_sums |= bool(len(sharding.unreduced_axes))
        axes = [*sharding.replicated_axes, *sharding.unreduced_axes]
        for dimension in sharding.dimension_shardings:
            axes += sdy.DimensionShardingAttr(dimension).axes
        self.split_axes |= any(sdy.AxisRefAttr(a).sub_axis_info is not None for a in axes)


# --- another mesh ------------------------------------------------------------------------------


def resize_meshes(module: ir.Module, axes: Sequence[tuple[str, int]]) -> None:
    """Makes every mesh of `module` the mesh `axes`, in place.

    Axes that a mesh has and `axes` lacks stay, with size 1, since shardings may name them. Meshes
    without axes (one device) stay as they are. All the shapes in a module are those of whole
    arrays, so nothing else depends on the sizes, as long as no operation is per device.
    """
    run_passes(module, "sdy-lift-inlined-meshes")
    for op in module.body.operations:
        operation = op.operation
        if operation.name != "sdy.mesh":
            continue
        mesh = sdy.MeshAttr(operation.attributes["mesh"])
        names = [sdy.MeshAxisAttr(axis).name for axis in mesh.axes]
        if not names:
            continue
        sizes = [*axes, *((n, 1) for n in names if n not in dict(axes))]
        operation.attributes["mesh"] = sdy.MeshAttr.get(
            [sdy.MeshAxisAttr.get(name, size) for name, size in sizes]
        )
        if _STABLEHLO_MESH in operation.attributes:
            operation.attributes[_STABLEHLO_MESH] = _stablehlo_mesh(sizes)
    count = math.prod(size for _, size in axes)
    if _PARTITIONS in module.operation.attributes:
        kind = ir.IntegerAttr(module.operation.attributes[_PARTITIONS]).type
        module.operation.attributes[_PARTITIONS] = ir.IntegerAttr.get(kind, count)
    module.operation.verify()


def _stablehlo_mesh(axes: Sequence[tuple[str, int]]) -> ir.Attribute:
    """Returns a mesh as JAX notes it a second time, as plain attributes."""
    index = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get(
        {
            "axes": ir.ArrayAttr.get(
                [
                    ir.DictAttr.get(
                        {"name": ir.StringAttr.get(name), "size": ir.IntegerAttr.get(index, size)}
                    )
                    for name, size in axes
                ]
            )
        }
    )


# --- a lowered function --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoweredParts:
    """The parts of a lowered function that decide what it computes.

    Attributes:
        module: the StableHLO module; JAX's own object, not to be changed.
        facts: plain data that counts and that the module does not say.
        constants: values of arguments that hold constants hoisted out of the module, in order.
    """

    module: ir.Module
    facts: dict[str, Any]
    constants: tuple[Any, ...]


def describe_lowered(lowered: jax.stages.Lowered) -> LoweredParts:
    """Takes a lowered function apart (`_lowering`, seen on jax 0.10.2 to 0.12.0.1)."""
    lowering: Any = lowered._lowering
    arguments = lowering.compile_args
    facts = {
        "platforms": list(lowering._platforms),
        "arguments": lowered.in_tree.num_leaves,
        "kept": sorted(arguments["kept_var_idx"]),
        "donated": list(lowering._donated_invars),
        "outputs": [_describe_aval(aval) for aval in arguments["global_out_avals"]],
        "effects": [
            [str(type(e)) for e in arguments[order]]
            for order in ("ordered_effects", "unordered_effects")
        ],
        "options": sorted([str(k), repr(v)] for k, v in lowering._compiler_options_kvs or ()),
    }
    return LoweredParts(lowering.stablehlo(), facts, tuple(lowering.const_args or ()))


def _describe_aval(aval: Any) -> list[Any]:
    """Returns shape, type, weak type and memory space as plain data, without the sharding."""
    return [
        [str(size) for size in getattr(aval, "shape", ())],
        str(getattr(aval, "dtype", type(aval).__name__)),
        bool(getattr(aval, "weak_type", False)),
        str(getattr(aval, "memory_space", "")),
    ]

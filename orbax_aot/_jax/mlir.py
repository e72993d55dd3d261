"""StableHLO modules through the MLIR bindings that JAX bundles.

Everything here was seen on jax 0.10.2, 0.11.2 and 0.12.0.1. Modules are handed over as bytes: an
`ir.Module` belongs to the thread-local or cached context that made it, and editing it in place
would corrupt what JAX keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib.mlir import ir, passmanager  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import sdy

Module = ir.Module
Operation = ir.Operation

_PARTITIONS = "mhlo.num_partitions"
_ARG_SHARDING = "sdy.sharding"
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
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        yield ir.Module.parse(code)


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
    """Removes shardings of inputs and outputs that say only that an array is committed.

    A sharding over a mesh without axes, in a program for one device, and the replication of a
    scalar: nothing else is possible there. What stays is no longer a module that verifies: the
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
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh" and symbol_name(op.operation) in empty:
            op.operation.erase()


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

"""`jax.export` below its public face: export without tracing, safe parsing, editing.

The layout of an `Exported` (its private fields and its flatbuffer) was seen on jax 0.10.2, 0.11.2
and 0.12.0.1. JAX imports `flatbuffers` for it, which is why this module does too, in effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import export as jax_export
from jax._src import core
from jax._src.export import _export, serialization_generated
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo
from jax.export import Exported

from orbax_aot._jax import mlir

# What a well-formed program may hold. Far above anything real, and small enough that a damaged or
# hostile file cannot make parsing slow.
MAX_ARRAYS = 65_535  # JAX stores the indices of kept arguments in 16 bits.
MAX_RANK = 64
MAX_NAMES = 64
MAX_NAME_BYTES = 4_096

_MAGIC = b"OAOTHLO1"
_BYTECODE_MAGIC = b"ML\xefR"
_PRODUCER = re.compile(rb"\rStableHLO_v(\d{1,6})\.(\d{1,6})\.(\d{1,6})\x00")
_CONSTANT_SIZE = re.compile(rb"\d{1,19}")


class MalformedExportError(Exception):
    """The bytes are not a flat exported program."""


class NewerExportError(Exception):
    """The bytes were written by a JAX that is newer than this one can read."""


# --- making ------------------------------------------------------------------------------------


def export_traced(traced: jax.stages.Traced, platforms: Sequence[str]) -> Exported:
    """Lowers a trace for `platforms` and exports it, without tracing again.

    The same steps as `jax.export.export`, which would trace (`Traced.lower` with private
    parameters and `_export_lowered`, seen on jax 0.10.2 to 0.12.0.1).
    """
    parameters = jax_mlir.LoweringParameters(for_export=True, hoist_constants_as_args=False)
    lowered = traced.lower(lowering_platforms=tuple(platforms), _private_parameters=parameters)
    return export_lowered(traced, lowered)


def export_lowered(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> Exported:
    """Exports what is already lowered (`_export_lowered`, seen on jax 0.10.2 to 0.12.0.1)."""
    return _export._export_lowered(lowered, traced.jaxpr, traced.fun_name)


def lowered_platforms(lowered: jax.stages.Lowered) -> tuple[str, ...]:
    """Returns the platforms that `lowered` is for (`_platforms`, seen on 0.10.2 to 0.12.0.1)."""
    lowering: Any = lowered._lowering
    return tuple(lowering._platforms)


def holds_constants_as_arguments(lowered: jax.stages.Lowered) -> bool:
    """Whether constants were hoisted out of the module, which an export cannot hold."""
    lowering: Any = lowered._lowering
    return bool(lowering.const_args)


def host_callback_count(lowered: jax.stages.Lowered) -> int:
    """Returns how many Python callbacks `lowered` would call (seen on 0.10.2 to 0.12.0.1)."""
    arguments: Any = lowered._lowering.compile_args  # pyright: ignore[reportAttributeAccessIssue]
    return len(arguments["host_callbacks"] or ()) + len(arguments["keepalive"] or ())


def closes_over_references(traced: jax.stages.Traced) -> bool:
    """Whether a trace holds mutable arrays among its constants (seen on 0.10.2 to 0.12.0.1)."""
    return not all(is_plain_array(jax.typeof(c)) for c in traced.jaxpr.consts)


def flatten(exported: Exported) -> Exported:
    """Returns `exported` as a function from a flat tuple of arrays to a flat tuple of arrays.

    Tree definitions of user classes cannot be serialized, and the manifest describes trees anyway.
    """
    return dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def serialize(exported: Exported) -> bytes:
    """Serializes a flat `exported`, followed by a checksum and what JAX's format leaves out.

    The trailer is `facts | length of facts (4 bytes, little-endian) | sha256 of all before |
    magic`, where `facts` is JSON: the indices of inputs and outputs whose types are weak.
    `jax.export.deserialize` reads the whole as well, not seeing the trailer.
    """
    facts = {
        "weak_inputs": [i for i, aval in enumerate(exported.in_avals) if aval.weak_type],
        "weak_outputs": [i for i, aval in enumerate(exported.out_avals) if aval.weak_type],
    }
    text = json.dumps(facts).encode()
    content = bytes(exported.serialize(vjp_order=0)) + text + len(text).to_bytes(4, "little")
    return content + hashlib.sha256(content).digest() + _MAGIC


# --- reading -----------------------------------------------------------------------------------


def parse(data: bytes) -> Exported:
    """Reads what `serialize` wrote, without reaching native code.

    JAX's own reader follows whatever the bytes say, in time exponential in their length where
    they are hostile. So sizes and tree shapes are checked first. The checksum stands before
    MLIR's bytecode reader, which `opened_module` calls: of 800 modules with a few changed bytes,
    5 corrupted the heap there and 1 ran on (jax 0.12.0.1).

    Raises:
        MalformedExportError: the bytes are something else, or damaged.
        NewerExportError: a newer JAX wrote them.
    """
    try:
        table = serialization_generated.Exported.GetRootAsExported(data)
        _require_known_convention(table)
        facts = _read_trailer(data)
        _require_known_stablehlo(table)
        _require_sizes(table, len(data))
        exported = jax_export.deserialize(bytearray(data))
        return dataclasses.replace(
            exported,
            in_avals=_with_weak_types(exported.in_avals, facts["weak_inputs"]),
            out_avals=_with_weak_types(exported.out_avals, facts["weak_outputs"]),
        )
    except (MalformedExportError, NewerExportError):
        raise
    except Exception as e:
        raise MalformedExportError(f"not a serialized program ({type(e).__name__}: {e})") from e


def opened_module(exported: Exported) -> contextlib.AbstractContextManager[mlir.Module]:
    """Opens the module of `exported` for reading and editing, in a context of its own."""
    return mlir.opened(
        lambda: _jax.mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
    )


def _read_trailer(data: bytes) -> dict[str, list[int]]:
    end = len(data) - len(_MAGIC) - hashlib.sha256().digest_size
    _require(end > 4 and data.endswith(_MAGIC), "it ends without a checksum")
    content, checksum = data[:end], data[end : -len(_MAGIC)]
    _require(hashlib.sha256(content).digest() == checksum, "its checksum differs")
    length = int.from_bytes(content[-4:], "little")
    return json.loads(content[-4 - length : -4])


def _with_weak_types(avals: tuple[Any, ...], weak: Sequence[int]) -> tuple[Any, ...]:
    chosen = frozenset(weak)
    return tuple(a.update(weak_type=i in chosen) for i, a in enumerate(avals))


def _require_known_convention(table: Any) -> None:
    newest = jax_export.maximum_supported_calling_convention_version
    if table.CallingConventionVersion() > newest:
        raise NewerExportError(
            f"calling convention {table.CallingConventionVersion()}, here at most {newest}"
        )


def _require_known_stablehlo(table: Any) -> None:
    _require(not table.MlirModuleSerializedIsNone(), "it has no module")
    head = bytes(memoryview(table.MlirModuleSerializedAsNumpy())[:64])
    producer = _PRODUCER.match(head, len(_BYTECODE_MAGIC))
    if producer is None or not head.startswith(_BYTECODE_MAGIC):
        raise MalformedExportError("its module is not StableHLO bytecode")
    version = tuple(int(number) for number in producer.groups())
    current = tuple(int(number) for number in hlo.get_current_version().split("."))
    if version > current:
        raise NewerExportError(f"StableHLO {_dotted(version)}, here {_dotted(current)}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _require_sizes(table: Any, nbytes: int) -> None:
    """Raises unless everything that JAX's reader loops over is small, and the trees are flat."""
    inputs, outputs = table.InAvalsIdxsLength(), table.OutAvalsIdxsLength()
    for count in (inputs, outputs):
        _require(count <= MAX_ARRAYS, f"{count} arrays, more than {MAX_ARRAYS}")
    _require(inputs or not table.InAvalsLength(), "inputs in an outdated form")
    _require(outputs or not table.OutAvalsLength(), "outputs in an outdated form")
    _require(table.InShardingsIdxsLength() == inputs, "not one sharding per input")
    _require(table.OutShardingsIdxsLength() == outputs, "not one sharding per output")
    _require(table.ModuleKeptVarIdxLength() <= inputs, "more arguments than inputs")
    _require(table.Vjp() is None, "derivatives, which are not read")
    for count in (table.PlatformsLength(), table.DisabledChecksLength()):
        _require(count <= MAX_NAMES, f"{count} names, more than {MAX_NAMES}")
    for effects in (table.OrderedEffectsLength(), table.UnorderedEffectsLength()):
        _require(effects <= MAX_NAMES, f"{effects} effects, more than {MAX_NAMES}")
    arguments = table.InTree()
    _require(arguments.ChildrenLength() == 2, "inputs that are not a flat tuple")
    _require_flat(arguments.Children(0), inputs)
    _require(arguments.Children(1).ChildrenLength() == 0, "keyword arguments")
    _require_flat(table.OutTree(), outputs)
    for count in (
        table.UniqueAvalsLength(),
        table.UniqueAbstractMeshesLength(),
        table.UniqueNamedShardingsLength(),
    ):
        _require(4 * count <= nbytes, f"{count} entries in {nbytes} bytes")
    for i in range(table.UniqueAvalsLength()):
        _require_small_aval(table.UniqueAvals(i))
    for i in range(table.UniqueAbstractMeshesLength()):
        _require_small_mesh(table.UniqueAbstractMeshes(i))
    for i in range(table.UniqueNamedShardingsLength()):
        _require_small_spec(table.UniqueNamedShardings(i).Spec())


def _require(condition: Any, problem: str) -> None:
    if not condition:
        raise MalformedExportError(problem)


def _require_flat(tree: Any, leaves: int) -> None:
    kinds = serialization_generated.PyTreeDefKind
    _require(tree.Kind() == kinds.tuple, "a tree that is not a tuple")
    _require(tree.ChildrenLength() == leaves, f"{tree.ChildrenLength()} leaves for {leaves} arrays")
    for i in range(leaves):
        leaf = tree.Children(i)
        _require(leaf.Kind() == kinds.leaf and not leaf.ChildrenLength(), "a tree that is not flat")


def _require_small_aval(aval: Any) -> None:
    _require(aval.ShapeLength() <= MAX_RANK, f"rank {aval.ShapeLength()}")
    for i in range(aval.ShapeLength()):
        size = aval.Shape(i)
        _require(_CONSTANT_SIZE.fullmatch(size), f"size {bytes(size[:64])!r}, not a number")


def _require_small_mesh(mesh: Any) -> None:
    axes = mesh.AxisNamesLength()
    _require(axes <= MAX_NAMES, f"a mesh of {axes} axes")
    _require(
        mesh.AxisSizesLength() == axes == mesh.AxisTypesLength(), "not one size and type per axis"
    )
    for i in range(axes):
        _require(len(mesh.AxisNames(i)) <= MAX_NAME_BYTES, "a very long name of an axis")


def _require_small_spec(spec: Any) -> None:
    counts = [spec.PartitionsLength(), spec.ReducedLength(), spec.UnreducedLength()]
    _require(max(counts) <= MAX_RANK, f"a sharding of rank {max(counts)}")
    for i in range(spec.PartitionsLength()):
        _require(spec.Partitions(i).AxesLength() <= MAX_NAMES, "very many axes for one dimension")


# --- editing -----------------------------------------------------------------------------------


def replace_module(
    exported: Exported,
    code: bytes,
    nr_devices: int,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
) -> Exported:
    """Returns `exported` with another module, device count and named shardings."""
    return dataclasses.replace(
        exported,
        mlir_module_serialized=code,
        nr_devices=nr_devices,
        _in_named_shardings=tuple(in_shardings),
        _out_named_shardings=tuple(out_shardings),
    )


def named_shardings(exported: Exported) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the shardings of inputs and outputs, over abstract meshes; `None` is unspecified."""
    return exported._in_named_shardings, exported._out_named_shardings


def stable_calls() -> frozenset[str]:
    """Returns the targets of custom calls that JAX promises to keep (0.10.2 to 0.12.0.1).

    Where a JAX has no such list, none is known to be stable.
    """
    return frozenset(getattr(_export, "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", ()))


def has_constant_shape(aval: Any) -> bool:
    """Whether an aval's sizes are all known (`core.is_constant_shape`, 0.10.2 to 0.12.0.1)."""
    return core.is_constant_shape(aval.shape)


def is_plain_array(aval: Any) -> bool:
    """Whether an aval is an array's, not a mutable reference's or a token's."""
    return isinstance(aval, core.ShapedArray)

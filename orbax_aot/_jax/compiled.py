"""`jax.stages.Compiled`: taken apart into plain data and PJRT bytes, and put together again.

Seen on jax 0.10.2, 0.11.2 and 0.12.0.1, each function unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from orbax_aot import manifest as m
from orbax_aot._jax import devices as devices_lib
from orbax_aot._jax import values
from orbax_aot.errors import CorruptArtifactError, NotSerializableError

_HOST_CALLBACK_TARGETS = re.compile(r"_python_|host_callback|SendToHost|RecvFromHost")
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')


def unloaded(compiled: jax.stages.Compiled) -> Any:
    """Returns the `UnloadedMeshExecutable` of a compiled function.

    Raises:
      NotSerializableError: there is none, as on backends that cannot serialize.
    """
    found = getattr(compiled._executable, "_unloaded_executable", None)
    if found is None:
        raise NotSerializableError("Compilation does not support serialization.")
    return found


def require_xla_lowering(lowered: jax.stages.Lowered) -> None:
    """Raises `NotSerializableError` where a lowering does not go through XLA."""
    from jax._src.interpreters import pxla

    if not isinstance(lowered._lowering, pxla.MeshComputation):
        raise NotSerializableError("AOT is not implemented for non-XLA lowerings.")


def devices_of(compiled: jax.stages.Compiled) -> tuple[Any, ...]:
    """Returns the devices of a compiled function, in the order of its device assignment."""
    return tuple(unloaded(compiled).device_list)


def backend_of(compiled: jax.stages.Compiled) -> Any:
    return unloaded(compiled).backend


def payload_of(compiled: jax.stages.Compiled) -> bytes:
    """Returns the PJRT bytes of a compiled function, loaded or compiled for devices that are not here."""
    from jax._src.lib import xla_client as xc

    executable = unloaded(compiled).xla_executable
    if isinstance(executable, xc.LoadedExecutable):
        return bytes(executable.client.serialize_executable(executable))
    return bytes(executable.serialize())


def constants_of(compiled: jax.stages.Compiled) -> tuple[Any, ...]:
    """Returns the constants that a compiled function takes as hidden leading arguments."""
    return tuple(compiled._params.const_args)


def find_unserializable(compiled: jax.stages.Compiled) -> str | None:
    """Returns why a compiled function cannot be stored as data; None where it can."""
    parts = unloaded(compiled)
    if parts.mut is not None and parts.mut.in_mut:
        return "The program closes over a mutable ref; pass it as an argument."
    if getattr(compiled._params, "is_high", False):
        return "The program has hi-type arguments or results."
    return None


def has_host_callbacks(compiled: jax.stages.Compiled) -> bool:
    """Whether running the program needs live Python functions or runtime tokens."""
    parts = unloaded(compiled)
    return bool(parts.host_callbacks or parts.ordered_effects or parts.unordered_effects)


@dataclasses.dataclass(frozen=True)
class Description:
    """All of a compiled function but its bytes; `constants` are raw, in the order of `variant_fields`' own."""

    inputs: tuple[m.Leaf, ...]
    outputs: tuple[m.Leaf, ...]
    variant_fields: dict[str, Any]
    constants: tuple[tuple[dict[str, Any], bytes], ...]


def describe(
    compiled: jax.stages.Compiled,
    tables: m.Tables,
    input_paths: Sequence[str],
    output_paths: Sequence[str],
) -> Description:
    """Describes a compiled function by structs.

    `input_paths` and `output_paths` name the leaves of its argument tree and of its result tree, flat.

    Raises:
      NotSerializableError: it holds what plain data cannot describe; the message says what.
    """
    parts = unloaded(compiled)
    if (why := find_unserializable(compiled)) is not None:
        raise NotSerializableError(why)
    encoder = values.Encoder(tables, {d: i for i, d in enumerate(parts.device_list)})
    constants = tuple(values.describe_constant(c) for c in constants_of(compiled))
    is_info = lambda x: isinstance(x, jax.stages.ArgInfo)
    infos = jax.tree.leaves(compiled.args_info, is_leaf=is_info)
    kept = tuple(sorted(int(i) for i in parts.kept_var_idx))
    sharding_of = {}
    for index, sharding in zip(kept, parts.input_shardings, strict=False):
        sharding_of[index - len(constants)] = sharding
    inputs = tuple(
        encoder.leaf(info._aval, path, sharding=sharding_of.get(i), donated=info.donated)
        for i, (info, path) in enumerate(zip(infos, input_paths, strict=True))
    )
    out_refs = None if parts.mut is None else tuple(parts.mut.out_mut)
    visible = [i for i in range(len(parts.output_avals)) if out_refs is None or out_refs[i] is None]
    outputs = tuple(
        encoder.leaf(parts.output_avals[i], path, sharding=parts.output_shardings[i])
        for i, path in zip(visible, output_paths, strict=True)
    )
    n_in = len(kept)
    names = None
    if parts.all_args_info is not None and parts.all_args_info.debug_info.arg_names is not None:
        names = tuple(str(n or "") for n in parts.all_args_info.debug_info.arg_names)
    fields = {
        "name": str(parts.name),
        "kept": kept,
        "in_shardings": tuple(map(encoder.sharding, parts.input_shardings[:n_in])),
        "out_shardings": tuple(map(encoder.sharding, parts.output_shardings)),
        "in_types": tuple(map(encoder.aval_type, parts.input_avals[:n_in])),
        "out_types": tuple(map(encoder.aval_type, parts.output_avals)),
        "layouts": m.Layouts(
            inputs=tuple(map(encoder.layout, parts.xla_in_layouts[:n_in])),
            dispatch=tuple(map(encoder.layout, parts.dispatch_in_layouts[:n_in])),
            outputs=tuple(map(encoder.layout, parts.xla_out_layouts)),
        ),
        "committed": bool(parts.committed),
        "no_kwargs": bool(compiled._no_kwargs),
        "arg_names": names,
        "out_refs": out_refs,
        "callbacks": len(parts.host_callbacks or ()),
        "effects": bool(parts.ordered_effects or parts.unordered_effects),
    }
    _require_faithful(parts, inputs, outputs, fields, visible, len(constants))
    return Description(inputs, outputs, fields, constants)


def _require_faithful(
    parts: Any,
    inputs: Sequence[m.Leaf],
    outputs: Sequence[m.Leaf],
    fields: dict[str, Any],
    visible: Sequence[int],
    n_constants: int,
) -> None:
    """Raises where the program's own avals say more than the leaves do.

    Inputs and results are described once for all variants of a signature; a variant adds only its shardings.
    """
    kept, avals = fields["kept"], parts.input_avals
    pairs = [
        (avals[k], inputs[index - n_constants])
        for k, index in enumerate(kept)
        if index >= n_constants
    ]
    pairs += [(parts.output_avals[i], leaf) for i, leaf in zip(visible, outputs, strict=True)]
    for aval, leaf in pairs:
        if leaf.kind == "array" and (
            tuple(aval.shape) != leaf.shape or values.describe_dtype(aval.dtype) != leaf.dtype
        ):
            raise NotSerializableError(
                f"{leaf.path}: the program has {aval.str_short()}, the call {leaf.dtype}{leaf.shape}."
            )


def custom_calls_of(compiled: jax.stages.Compiled) -> tuple[str, ...]:
    """Returns the targets of the program's custom calls, sorted; walks the whole program text."""
    text = compiled.as_text() or ""
    return tuple(sorted(set(_CUSTOM_CALL.findall(text))))


def names_host_callbacks(targets: Sequence[str]) -> bool:
    """Whether one of the custom-call targets runs Python."""
    return any(_HOST_CALLBACK_TARGETS.search(t) for t in targets)


def cost_of(compiled: jax.stages.Compiled) -> tuple[dict[str, float], dict[str, int]]:
    """Returns XLA's estimates of operations and bytes, and its memory needs in bytes, where it gives them."""
    cost: dict[str, float] = {}
    memory: dict[str, int] = {}
    try:
        analysis = compiled.cost_analysis() or {}
        for name in ("flops", "transcendentals", "bytes accessed"):
            value = analysis.get(name)
            if value is not None and math.isfinite(value):
                cost[name.replace(" ", "_")] = float(value)
        stats = compiled.memory_analysis()
        for name in ("argument", "output", "temp", "alias", "generated_code", "host_temp"):
            value = getattr(stats, f"{name}_size_in_bytes", None)
            if value is not None:
                memory[name] = int(value)
    except Exception:  # a backend need not have them, and nothing depends on them
        pass
    return cost, memory


def hlo_fingerprint_of(compiled: jax.stages.Compiled) -> str | None:
    """Returns XLA's own fingerprint of the program, stable over processes."""
    value = getattr(unloaded(compiled).xla_executable, "fingerprint", None)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return None if value is None else str(value)


def load_executable(
    payload: bytes, devices: Sequence[Any], options: Any, lowered: jax.stages.Lowered | None = None
) -> Any:
    """Loads PJRT bytes onto `devices`, flat, in the order of the device assignment; blocks until ready.

    The Python functions that the program calls are those of `lowered`, the same program lowered here.

    A wrong number of devices, damaged bytes, missing callbacks, or bytes for other software abort the process, and
    PJRT does not compare the list with the assignment in `options`: the caller has checked all of that.
    """
    client = devices[0].client
    device_list = devices_lib.make_device_list(devices)
    callbacks = [] if lowered is None else lowered._lowering.compile_args.get("host_callbacks", [])
    if not callbacks:  # a backend need not know them
        return client.deserialize_executable(payload, device_list, options)
    return client.deserialize_executable(payload, device_list, options, callbacks)


def put_together(
    executable: Any,
    variant: m.Variant,
    inputs: Sequence[m.Leaf],
    outputs: Sequence[m.Leaf],
    decoder: values.Decoder,
    constants: Sequence[Any],
    in_tree: Any,
    out_tree: Any,
    lowered: jax.stages.Lowered | None = None,
) -> jax.stages.Compiled:
    """Makes a `Compiled` of a loaded executable and its description.

    `in_tree` is the tree definition of `(args, kwargs)`, `out_tree` that of the result. Host callbacks and effects
    are live objects and come from `lowered`, the same program lowered here.
    """
    from jax._src import core
    from jax._src.interpreters import pxla

    n_constants = len(constants)
    leaf_of = {n_constants + i: leaf for i, leaf in enumerate(inputs)}
    input_avals = [
        jax.typeof(constants[index])
        if index < n_constants
        else decoder.aval(leaf_of[index], variant.in_types[k])
        for k, index in enumerate(variant.kept)
    ]
    outputs_left = list(outputs)
    output_avals = []
    for i, type_index in enumerate(variant.out_types):
        source = None if variant.out_refs is None else variant.out_refs[i]
        if source is None:
            leaf = outputs_left.pop(0)
        else:  # written to an input ref: of that ref's inner type
            leaf = _without_ref(leaf_of[variant.kept[source]])
        output_avals.append(decoder.aval(leaf, type_index))
    all_avals = [decoder.aval(leaf) for leaf in inputs]
    names = variant.arg_names
    all_args = pxla.AllArgsInfo(
        [*map(jax.typeof, constants), *all_avals],
        core.DebugInfo("jit", variant.name, names, None),
    )
    live = {} if lowered is None else lowered._lowering.compile_args
    parts = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices_lib.make_device_list(decoder.devices),
        backend=decoder.devices[0].client,
        name=variant.name,
        input_avals=input_avals,
        input_shardings=[decoder.sharding(i) for i in variant.in_shardings],
        xla_in_layouts=[decoder.layout(i) for i in variant.layouts.inputs],
        dispatch_in_layouts=[decoder.layout(i) for i in variant.layouts.dispatch],
        output_avals=output_avals,
        output_shardings=[decoder.sharding(i) for i in variant.out_shardings],
        xla_out_layouts=[decoder.layout(i) for i in variant.layouts.outputs],
        committed=variant.committed,
        kept_var_idx=set(variant.kept),
        mut=None if variant.out_refs is None else pxla.MutationData([], list(variant.out_refs)),
        all_args_info=all_args,
        unordered_effects=live.get("unordered_effects", []),
        ordered_effects=live.get("ordered_effects", []),
        keepalive=live.get("keepalive", []),
        host_callbacks=live.get("host_callbacks", []),
        pgle_profiler=None,
    )
    info = in_tree.unflatten(
        [
            jax.stages.ArgInfo(aval, leaf.donated)
            for aval, leaf in zip(all_avals, inputs, strict=True)
        ]
    )
    return jax.stages.Compiled(
        parts.load(), list(constants), info, out_tree, no_kwargs=variant.no_kwargs
    )


def _without_ref(leaf: m.Leaf) -> m.Leaf:
    import msgspec

    return msgspec.structs.replace(leaf, kind="array")


def count_host_callbacks(lowered: jax.stages.Lowered) -> int:
    return len(lowered._lowering.compile_args.get("host_callbacks", ()))


def compile_fresh_payload(lowered: jax.stages.Lowered) -> bytes:
    """Compiles past JAX's caches in memory and on disk, and returns the PJRT bytes.

    Serializing an executable that was itself loaded, as after a hit of the persistent cache, can give bytes that
    load and then do not run (on the CPU). JAX decides once for the process whether its cache is used, so the cache
    cannot be switched off for one compilation; this goes straight to the backend.
    """
    from jax._src import compiler
    from jax._src.interpreters import pxla

    lowering: Any = lowered._lowering
    args = lowering.compile_args
    device_list = lowering._device_list
    devices = np.empty(len(device_list), object)
    devices[:] = list(device_list)
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    module = lowering.stablehlo()
    options = pxla.create_compile_options(
        module,
        args["tuple_args"],
        to_inputs,
        to_outputs,
        args["backend"],
        devices,
        dict(lowering._compiler_options_kvs),
    )
    executable = compiler.backend_compile_and_load(
        args["backend"], module, device_list, options, args["host_callbacks"]
    )
    return bytes(executable.client.serialize_executable(executable))


def compiler_options_of(lowered: jax.stages.Lowered) -> dict[str, str]:
    """Returns the `compiler_options` that a function was jitted with."""
    kvs = getattr(lowered._lowering, "_compiler_options_kvs", ())
    return {str(k): str(v) for k, v in kvs}


# The element types of HLO text, by JAX's dtype names.
_HLO_TYPES = {
    "bool": "pred",
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
}
_HLO_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_HLO_LAYOUT = "entry_computation_layout={"


def find_shape_lie(executable: Any, compiled: jax.stages.Compiled) -> str | None:
    """Returns how the declared shapes differ from what the loaded executable says of itself; None where they agree.

    An executable under edited metadata would run and return arrays that lie about themselves. The program text
    begins with the shapes of its parameters and results on one device. Printing it costs about 2 % of loading.
    """
    parts = unloaded(compiled)
    try:
        text = executable.hlo_modules()[0].to_string()
    except Exception:  # a backend need not keep the program; the digests stand
        return None
    start = text.find(_HLO_LAYOUT)
    if start < 0:
        return None
    found = _balanced(text, start + len(_HLO_LAYOUT))
    left, arrow, right = found.partition("->")
    if not arrow:
        return None
    for what, section, avals, shardings in (
        ("argument", left, parts.input_avals, parts.input_shardings),
        ("result", right, parts.output_avals, parts.output_shardings),
    ):
        shapes = [s for s in _HLO_SHAPE.findall(section) if s[0] != "token"]
        declared = [
            _hlo_shape(aval, sharding) for aval, sharding in zip(avals, shardings, strict=False)
        ]
        declared = [d for d in declared if d is not None]
        if len(shapes) != len(declared):
            return f"{len(declared)} {what}s declared, the executable has {len(shapes)}"
        for i, (found_shape, expected) in enumerate(zip(shapes, declared, strict=True)):
            if (expected[0] and found_shape[0] != expected[0]) or found_shape[1] != expected[1]:
                return (
                    f"{what} {i} declared as {expected[0]}[{expected[1]}] on each device, the "
                    f"executable has {found_shape[0]}[{found_shape[1]}]"
                )
    return None


def _balanced(text: str, start: int) -> str:
    depth, i = 1, start
    while depth and i < len(text):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        i += 1
    return text[start : i - 1]


def _hlo_shape(aval: Any, sharding: Any) -> tuple[str, str] | None:
    """Returns element type ('' where HLO's name is not known) and dimensions of an aval on one device."""
    from jax._src import core, sharding_impls

    if isinstance(aval, core.AbstractToken):
        return None
    aval = getattr(aval, "inner_aval", aval)
    shape = tuple(aval.shape)
    if not isinstance(sharding, sharding_impls.UnspecifiedValue) and sharding is not None:
        shape = tuple(sharding.shard_shape(shape))
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        element = core.physical_element_aval(aval.dtype)
        shape, dtype = (*shape, *element.shape), element.dtype
    else:
        dtype = aval.dtype
    name = "bool" if dtype == jax.dtypes.float0 else jax.numpy.dtype(dtype).name
    hlo = _HLO_TYPES.get(name)
    if hlo is None:
        hlo = re.sub(r"^uint", "u", re.sub(r"^int", "s", name)) if "int" in name else ""
    return hlo, ",".join(map(str, shape))


def require_honest_shapes(executable: Any, compiled: jax.stages.Compiled, where: str) -> None:
    """Raises `CorruptArtifactError` where declared and real shapes differ."""
    if (lie := find_shape_lie(executable, compiled)) is not None:
        raise CorruptArtifactError(f"{where}: {lie}. Save this step again.")


def program_text(executable: Any) -> str:
    """Returns the optimized HLO of a loaded executable."""
    return "\n\n".join(module.to_string() for module in executable.hlo_modules())


def backend_of_lowered(lowered: jax.stages.Lowered) -> Any:
    """Returns the client that a lowered function will be compiled by."""
    return lowered._lowering.compile_args["backend"]


def argument_shardings(compiled: jax.stages.Compiled) -> list[Any]:
    """Returns the sharding of each flat argument as the program expects it; None where it is unused."""
    parts = unloaded(compiled)
    n_constants = len(constants_of(compiled))
    found: dict[int, Any] = {}
    for index, sharding in zip(sorted(parts.kept_var_idx), parts.input_shardings, strict=False):
        found[index - n_constants] = sharding
    return [found.get(i) for i in range(compiled.in_tree.num_leaves)]


def visible_outputs(compiled: jax.stages.Compiled) -> tuple[list[Any], list[Any]]:
    """Returns avals and shardings of the flat results, without what is written into refs."""
    parts = unloaded(compiled)
    refs = None if parts.mut is None else parts.mut.out_mut
    seen = [i for i in range(len(parts.output_avals)) if refs is None or refs[i] is None]
    return [parts.output_avals[i] for i in seen], [parts.output_shardings[i] for i in seen]

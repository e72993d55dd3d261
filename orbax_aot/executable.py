"""`PartiallySerialized` ⇄ `jax.stages.Compiled`: without pickle, on any devices of the same number.

What is stored of a compiled function is JSON and PJRT bytes. Trees are not: they come from the caller, either as the
same function lowered here or as tree definitions.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from orbax_aot import manifest as m
from orbax_aot import store, topology, trees
from orbax_aot._jax import compiled as compiled_lib
from orbax_aot._jax import devices as devices_lib
from orbax_aot._jax import values
from orbax_aot.errors import CorruptArtifactError, DeviceCountError, NotSerializableError

_MAGIC = b"OAOT\x01\x00\x00\x00"
_NO_FILE = {
    "file": "",
    "sha256": "",
    "raw_sha256": "",
    "nbytes": 0,
    "raw_nbytes": 0,
    "codec": "raw",
}

# Counted for `benchmarks/`: what a later save of unchanged functions must not do.
counters = {"serializations": 0, "loads": 0}


def is_serializable(compiled: jax.stages.Compiled) -> bool:
    """Whether `partially_serialize` can store a compiled function. Serializes nothing."""
    try:
        return compiled_lib.find_unserializable(compiled) is None
    except NotSerializableError:
        return False


@dataclasses.dataclass(frozen=True)
class PartiallySerialized:
    """A compiled function as data: all of it but the trees of its arguments and results.

    Attributes:
      signature: arguments and results by path, and the one variant that this is.
      body: the meshes, shardings and layouts that `signature` points into.
      payload: raw PJRT bytes.
      constants: raw bytes of the constants that the program takes as hidden arguments.
    """

    signature: m.Signature
    body: m.Body
    payload: bytes
    constants: tuple[bytes, ...] = ()

    @property
    def variant(self) -> m.Variant:
        return self.signature.variants[0]

    @property
    def no_kwargs(self) -> bool:
        return self.variant.no_kwargs

    @property
    def in_memory_kinds(self) -> tuple[str | None, ...]:
        """Memory kinds of the kept inputs, in the program's order; None where unspecified."""
        return tuple(map(self._memory_kind, self.variant.in_shardings))

    @property
    def out_memory_kinds(self) -> tuple[str | None, ...]:
        """Memory kinds of the outputs, in the program's order; None where unspecified."""
        return tuple(map(self._memory_kind, self.variant.out_shardings))

    def _memory_kind(self, index: int | None) -> str | None:
        return None if index is None else self.body.shardings[index].memory

    @property
    def compile_options(self) -> Any:
        """Fresh native compile options with the saved device assignment. Nothing else is taken over from the save."""
        saved = self.variant.topology
        return devices_lib.make_compile_options(
            saved.replicas,
            saved.partitions,
            _assign(saved.ids, saved.replicas, saved.partitions),
        )

    def to_bytes(self) -> bytes:
        """Returns one self-contained block of bytes: JSON, then payload, then constants."""
        function = m.Function(signatures=(self.signature,))
        body = msgspec.structs.replace(self.body, functions={"": function})
        header = m.encode(body)
        return b"".join(
            (_MAGIC, struct.pack("<Q", len(header)), header, self.payload, *self.constants)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> PartiallySerialized:
        """Reads what `to_bytes` wrote. Checks its digests; runs none of it.

        Raises:
          CorruptArtifactError: the bytes are damaged or something else.
        """
        where = "PartiallySerialized"
        start = len(_MAGIC) + 8
        if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
            raise CorruptArtifactError(f"{where}: does not begin with {_MAGIC!r}.")
        (length,) = struct.unpack("<Q", data[len(_MAGIC) : start])
        if length > min(m.MAX_MANIFEST_NBYTES, len(data) - start):
            raise CorruptArtifactError(f"{where}: a header of {length} bytes does not fit in.")
        manifest = m.decode(data[start : start + length], where)
        function = manifest.functions.get("")
        if function is None or len(function.signatures) != 1:
            raise CorruptArtifactError(f"{where}: expected one signature in the header.")
        signature = function.signatures[0]
        if len(signature.variants) != 1:
            raise CorruptArtifactError(f"{where}: expected one variant in the header.")
        variant = signature.variants[0]
        parts, at = [], start + length
        for file in (variant, *variant.constants):
            part = data[at : at + file.raw_nbytes]
            at += file.raw_nbytes
            if len(part) != file.raw_nbytes or store.digest(part) != file.raw_sha256:
                raise CorruptArtifactError(f"{where}: {file.file or 'payload'} is damaged.")
            parts.append(part)
        if at != len(data):
            raise CorruptArtifactError(f"{where}: {len(data) - at} bytes follow the end.")
        body = msgspec.structs.replace(manifest.body, functions={})
        return cls(signature, body, parts[0], tuple(parts[1:]))


def partially_serialize(
    compiled: jax.stages.Compiled, execution_devices: Sequence[Any]
) -> PartiallySerialized:
    """Stores a compiled function as data.

    `execution_devices` are the devices it was compiled for, flat, in the order of its device assignment.

    Raises:
      NotSerializableError: it holds what plain data cannot describe.
      DeviceTypeError, ClientMismatchError, DeviceCountError: the devices are not the program's.
    """
    saved_devices = compiled_lib.devices_of(compiled)
    devices = topology.require_devices(execution_devices, compiled_lib.backend_of(compiled))
    _require_count(1, len(saved_devices), len(devices))
    return serialize(compiled)


def serialize(
    compiled: jax.stages.Compiled,
    payload: bytes | None = None,
    environment: m.Environment | None = None,
) -> PartiallySerialized:
    """As `partially_serialize`, on the program's own devices.

    `payload` replaces the program's own bytes; `environment` is the one it was compiled in, now's by default.
    """
    tables = m.Tables()
    is_info = lambda x: isinstance(x, jax.stages.ArgInfo)
    input_paths = trees.argument_paths(compiled.args_info, is_leaf=is_info)
    output_paths = trees.leaf_paths(trees.dummy(compiled.out_tree))
    described = compiled_lib.describe(compiled, tables, input_paths, output_paths)
    calls = compiled_lib.custom_calls_of(compiled)
    if not described.variant_fields["callbacks"] and compiled_lib.names_host_callbacks(calls):
        raise NotSerializableError(
            f"The program calls back into Python ({', '.join(calls)}), and its callbacks are not at hand."
        )
    if payload is None:
        payload = make_payload(compiled)
    devices = compiled_lib.devices_of(compiled)
    cost, memory = compiled_lib.cost_of(compiled)
    constants = tuple(
        m.Constant(**{**_NO_FILE, **_raw_digest(raw)}, **about)
        for about, raw in described.constants
    )
    variant = m.Variant(
        **{**_NO_FILE, **_raw_digest(payload)},
        topology=topology.describe_devices(devices),
        environment=environment or topology.describe_environment(compiled_lib.backend_of(compiled)),
        rank=None,
        cost=cost,
        memory=memory,
        custom_calls=calls,
        hlo_fingerprint=compiled_lib.hlo_fingerprint_of(compiled),
        constants=constants,
        **described.variant_fields,
    )
    signature = m.Signature(
        folder="",
        inputs=described.inputs,
        outputs=described.outputs,
        output_tree=trees.describe_result(compiled.out_tree, compiled.in_tree, input_paths),
        code=None,
        program=None,
        portable=None,
        variants=(variant,),
    )
    return PartiallySerialized(
        signature, tables.body(), payload, tuple(raw for _, raw in described.constants)
    )


def make_payload(
    compiled: jax.stages.Compiled,
    lowered: jax.stages.Lowered | None = None,
    *,
    fresh: bool = False,
) -> bytes:
    """Returns the PJRT bytes of a compiled function; compiles it once more where its own cannot be had.

    `lowered` is what it was compiled from, where that is known; with `fresh`, its own bytes are known not to do.

    Raises:
      NotSerializableError: its bytes cannot be had, and nothing says how to compile it.
    """
    counters["serializations"] += 1
    if lowered is None or not fresh:
        try:
            return compiled_lib.payload_of(compiled)
        except NotSerializableError:
            raise
        except Exception as e:
            # On the CPU (XLA of jax 0.10.2 to 0.12.0.1) a program that sorts cannot be serialized once it has run:
            # "`LessThan` is not serializable".
            if lowered is None:
                raise NotSerializableError(
                    f"{e} A program that sorts can be serialized only before its first call; save an AotFunction "
                    "or an Executable instead of a jax.stages.Compiled."
                ) from e
    return compiled_lib.compile_fresh_payload(lowered)


def _raw_digest(raw: bytes) -> dict[str, Any]:
    digest = store.digest(raw)
    return {"sha256": digest, "raw_sha256": digest, "nbytes": len(raw), "raw_nbytes": len(raw)}


def load_compiled_from_serialized(
    lowered: jax.stages.Lowered | None,
    partially_serialized: PartiallySerialized,
    execution_devices: Sequence[Any],
    *,
    in_tree: Any = None,
    out_tree: Any = None,
) -> jax.stages.Compiled:
    """Loads a stored function onto `execution_devices`, flat, in the order of its device assignment.

    Trees (and host callbacks, where the program has them) come from `lowered`, the same function lowered here. With
    `lowered=None` they are given: `in_tree` is the tree definition of `(args, kwargs)`, `out_tree` that of the
    result, and nothing is traced. Blocks until loaded. Runs native code: load only what you trust.

    Raises:
      DeviceTypeError, ClientMismatchError, DeviceCountError: the devices cannot take the program.
      NotSerializableError: `lowered` does not go through XLA, or callbacks are needed and not at hand.
      CorruptArtifactError: the declared shapes are not the program's.
    """
    if lowered is not None:
        compiled_lib.require_xla_lowering(lowered)
        in_tree, out_tree = lowered.in_tree, lowered.out_tree
    elif in_tree is None or out_tree is None:
        raise TypeError(
            "load_compiled_from_serialized needs `lowered`, or both in_tree= and out_tree=."
        )
    program = LoadedProgram.load(partially_serialized, execution_devices, lowered)
    return program.compiled(in_tree, out_tree)


def remap_compile_options_device_assignment(options: Any, execution_devices: Sequence[Any]) -> Any:
    """Returns a copy of native compile options whose device assignment is `execution_devices`.

    The devices fill the assignment (replicas × computations) column by column, as a flat list of them is ordered.

    Raises:
      DeviceTypeError, ClientMismatchError: the list does not hold devices of one client.
      DeviceCountError: it holds another number of devices than the assignment.
    """
    devices = topology.require_devices(execution_devices)
    replicas, computations = devices_lib.assignment_shape(options)
    _require_count(replicas, computations, len(devices))
    return devices_lib.with_assignment(
        options, _assign([d.id for d in devices], replicas, computations)
    )


def _assign(ids: Sequence[int], replicas: int, computations: int) -> np.ndarray:
    return np.asarray(ids, dtype=np.int64).reshape((replicas, computations), order="F")


def _require_count(replicas: int, computations: int, found: int) -> None:
    if replicas * computations != found:
        raise DeviceCountError(
            "Cannot remap XLA compile options device assignment: assignment expects "
            f"{replicas * computations} devices (replica_count={replicas} x "
            f"computation_count={computations}), but got {found} execution devices."
        )


def _require_own_devices(variant: m.Variant, body: m.Body) -> None:
    """Raises `CorruptArtifactError` where a mesh of the program is not that of its device assignment.

    JAX orders the devices of a program as its shardings do. Shards of arguments in another order go to devices that do
    not run them, at which jax 0.10.2 ends the process.
    """
    for index in {*variant.in_shardings, *variant.out_shardings}:
        mesh_index = None if index is None else body.shardings[index].mesh
        if mesh_index is None:
            continue
        mesh = body.meshes[mesh_index]
        if mesh.positions is None or (
            mesh.size == variant.topology.count and mesh.positions != tuple(range(mesh.size))
        ):
            raise CorruptArtifactError(
                f"{variant.name}: a mesh over positions {mesh.positions} is none of the program's "
                f"{variant.topology.count} devices, in their order. Save this step again."
            )


@dataclasses.dataclass(frozen=True)
class LoadedProgram:
    """A native executable on its devices, with all that makes a `Compiled` of it for a caller's trees."""

    executable: Any
    saved: PartiallySerialized
    decoder: values.Decoder
    constants: tuple[Any, ...]
    lowered: jax.stages.Lowered | None = None

    @classmethod
    def load(
        cls,
        saved: PartiallySerialized,
        execution_devices: Sequence[Any],
        lowered: jax.stages.Lowered | None = None,
    ) -> LoadedProgram:
        """Loads the payload; blocks. See `load_compiled_from_serialized` for what it raises.

        Each condition that would abort the process in native code is checked here, right before it.
        """
        devices = topology.require_devices(execution_devices)
        variant = saved.variant
        options = remap_compile_options_device_assignment(saved.compile_options, devices)
        if store.digest(saved.payload) != variant.raw_sha256:
            raise CorruptArtifactError("The payload is not the one its manifest tells of.")
        if (variant.callbacks or variant.effects) and lowered is None:
            raise NotSerializableError(
                "The program calls back into Python; it loads only with the live function lowered."
            )
        if lowered is not None:
            found = compiled_lib.count_host_callbacks(lowered)
            if found != variant.callbacks:
                raise NotSerializableError(
                    f"The program was saved with {variant.callbacks} host callbacks, lowered here with {found}."
                )
        _require_own_devices(variant, saved.body)
        decoder = values.Decoder(saved.body, devices)
        constants = tuple(
            values.make_constant(c, raw)
            for c, raw in zip(variant.constants, saved.constants, strict=True)
        )
        if any(call.startswith("lapack_") for call in variant.custom_calls):
            devices_lib.register_lapack()
        counters["loads"] += 1
        executable = compiled_lib.load_executable(saved.payload, devices, options, lowered)
        program = cls(executable, saved, decoder, constants, lowered)
        compiled_lib.require_honest_shapes(executable, program.flat(), variant.name)
        return program

    @property
    def devices(self) -> tuple[Any, ...]:
        return self.decoder.devices

    def flat(self, *, committed: bool | None = None) -> jax.stages.Compiled:
        """Returns a `Compiled` that takes the flat leaves as arguments and returns a flat tuple."""
        n_in, n_out = len(self.saved.signature.inputs), len(self.saved.signature.outputs)
        in_tree = jax.tree.structure((tuple(range(n_in)), {}))
        return self.compiled(in_tree, jax.tree.structure(tuple(range(n_out))), committed=committed)

    def compiled(
        self, in_tree: Any, out_tree: Any, *, committed: bool | None = None
    ) -> jax.stages.Compiled:
        """Returns a `Compiled` for these trees; `committed` replaces whether its results are."""
        variant, signature = self.saved.variant, self.saved.signature
        if committed is not None and committed != variant.committed:
            variant = msgspec.structs.replace(variant, committed=committed)
        return compiled_lib.put_together(
            self.executable,
            variant,
            signature.inputs,
            signature.outputs,
            self.decoder,
            self.constants,
            in_tree,
            out_tree,
            self.lowered,
        )

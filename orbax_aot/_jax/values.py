"""JAX's avals, shardings, layouts and dtypes ⇄ the manifest's structs.

Devices are written as positions in the program's device list, so that what is read can be placed on any list of the
same length. What plain data cannot describe raises `NotSerializableError`. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from orbax_aot import manifest as m
from orbax_aot.errors import CorruptArtifactError, NotSerializableError

_KEY_PREFIX = "key<"


class Encoder:
    """Describes JAX's values by structs, with meshes, shardings and layouts put into `tables`."""

    def __init__(self, tables: m.Tables, positions: Mapping[Any, int]):
        """`positions` maps each device of the program to its place in the program's device list."""
        self.tables = tables
        self.positions = positions
        self._seen: dict[int, tuple[Any, int | None]] = {}

    def sharding(self, sharding: Any) -> int | None:
        """Returns the table index of `sharding`; None where it is unspecified."""
        known = self._seen.get(id(sharding))
        if known is None:
            known = self._seen[id(sharding)] = (sharding, self._sharding(sharding))
        return known[1]

    def _sharding(self, sharding: Any) -> int | None:
        from jax._src import sharding_impls

        if sharding is None or isinstance(sharding, sharding_impls.UnspecifiedValue):
            return None
        if isinstance(sharding, NamedSharding):
            if getattr(sharding, "_logical_device_ids", None) is not None:
                raise NotSerializableError(
                    "A NamedSharding with logical device ids cannot be saved."
                )
            return self.tables.add_sharding(
                m.Sharding(
                    mesh=self.tables.add_mesh(self._mesh(sharding.mesh)),
                    memory=sharding.memory_kind,
                    **_describe_spec(sharding.spec),
                )
            )
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return self.tables.add_sharding(
                m.Sharding(device=self._position(device), memory=sharding.memory_kind)
            )
        if isinstance(sharding, sharding_impls.GSPMDSharding):
            proto = sharding._hlo_sharding.to_proto().SerializeToString()
            return self.tables.add_sharding(
                m.Sharding(
                    hlo=base64.b64encode(proto).decode(),
                    positions=tuple(self._position(d) for d in sharding._device_assignment),
                    memory=sharding.memory_kind,
                )
            )
        raise NotSerializableError(f"A sharding of type {type(sharding).__name__} cannot be saved.")

    def _position(self, device: Any) -> int:
        if device not in self.positions:
            raise NotSerializableError(f"{device} is not among the devices of the program.")
        return self.positions[device]

    def _mesh(self, mesh: Any) -> m.Mesh:
        axes = tuple(
            (_axis_name(n), int(s)) for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
        )
        types = tuple(t.name for t in mesh.axis_types)
        if isinstance(mesh, AbstractMesh):
            device = mesh.abstract_device
            kind = (
                None if device is None else (device.device_kind, device.num_cores, device.platform)
            )
            return m.Mesh(axes=axes, types=types, device=kind)
        positions = tuple(self._position(d) for d in mesh.devices.flat)
        return m.Mesh(axes=axes, types=types, positions=positions)

    def layout(self, layout: Any) -> int | None:
        """Returns the table index of a layout; None where it is the default or left to the compiler."""
        from jax._src.layout import AutoLayout, Layout

        if layout is None or layout is AutoLayout:
            return None
        if not isinstance(layout, Layout):
            raise NotSerializableError(f"The layout {layout!r} cannot be saved.")
        return self.tables.add_layout(
            m.Layout(
                order=tuple(layout.major_to_minor),
                tiling=None if layout.tiling is None else tuple(map(tuple, layout.tiling)),
                bits=layout.sub_byte_element_size_in_bits,
            )
        )

    def leaf(self, aval: Any, path: str, *, sharding: Any = None, donated: bool = False) -> m.Leaf:
        """Describes one argument or result of abstract value `aval`."""
        from jax._src import core
        from jax._src.layout import AutoLayout
        from jax._src.state.types import AbstractRef

        kind = "array"
        if isinstance(aval, core.AbstractToken):
            return m.Leaf(
                path=path,
                shape=(),
                dtype="bool",
                weak_type=False,
                sharding=None,
                donated=False,
                kind="token",
            )
        if isinstance(aval, AbstractRef):
            if aval.memory_space is not None or getattr(aval, "kind", None) is not None:
                raise NotSerializableError(f"{path}: a ref of type {aval} cannot be saved.")
            aval, kind = aval.inner_aval, "ref"
        if type(aval) is not core.ShapedArray:
            raise NotSerializableError(
                f"{path}: an abstract value of type {type(aval).__name__} cannot be saved."
            )
        if not getattr(aval, "manual_axis_type", _NothingManual).empty:
            raise NotSerializableError(f"{path}: {aval} varies over manual axes.")
        layout = getattr(aval, "layout", AutoLayout)  # since jax 0.12
        space = aval.memory_space
        return m.Leaf(
            path=path,
            shape=tuple(_dimension(d, path) for d in aval.shape),
            dtype=describe_dtype(aval.dtype),
            weak_type=bool(aval.weak_type),
            sharding=self.sharding(sharding),
            donated=bool(donated),
            kind=kind,
            type=self.aval_type(aval),
            space=None if space is core.MemorySpace.Device else space.name,
            layout=self.layout(layout),
        )

    def aval_type(self, aval: Any) -> int | None:
        """Returns the table index of the sharding inside an aval; None over an empty mesh."""
        sharding = getattr(aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return None
        return self.sharding(sharding)


class _NothingManual:
    empty = True


class Decoder:
    """Makes JAX's values of the structs of one manifest `body`, on `devices`.

    `devices` is flat, in the order of the program's device list. Raises `CorruptArtifactError` where a struct
    describes nothing that JAX can make.
    """

    def __init__(self, body: m.Body, devices: Sequence[Any]):
        self.body = body
        self.devices = tuple(devices)
        self._meshes: dict[int, Any] = {}
        self._shardings: dict[int, Any] = {}

    def mesh(self, index: int) -> Any:
        if index not in self._meshes:
            self._meshes[index] = self._make(
                self._mesh, self.body.meshes[index], f"meshes[{index}]"
            )
        return self._meshes[index]

    def sharding(self, index: int | None) -> Any:
        """Returns the sharding at `index` of the table; JAX's unspecified value for None."""
        from jax._src import sharding_impls

        if index is None:
            return sharding_impls.UNSPECIFIED
        if index not in self._shardings:
            self._shardings[index] = self._make(
                self._sharding, self.body.shardings[index], f"shardings[{index}]"
            )
        return self._shardings[index]

    def _make(self, make: Any, value: Any, where: str) -> Any:
        try:
            return make(value)
        except Exception as e:
            raise CorruptArtifactError(f"$.body.{where}: {value}: {e}") from e

    def _mesh(self, mesh: m.Mesh) -> Any:
        from jax._src.mesh import AbstractDevice

        names = tuple(n for n, _ in mesh.axes)
        sizes = tuple(s for _, s in mesh.axes)
        types = tuple(AxisType[t] for t in mesh.types)
        if mesh.positions is None:
            device = None if mesh.device is None else AbstractDevice(*mesh.device)
            return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)
        grid = np.empty(len(mesh.positions), object)
        grid[:] = [self._device(p) for p in mesh.positions]
        return jax.sharding.Mesh(grid.reshape(sizes), names, axis_types=types)

    def _device(self, position: int) -> Any:
        if not 0 <= position < len(self.devices):
            raise ValueError(f"position {position} of {len(self.devices)} devices")
        return self.devices[position]

    def _sharding(self, sharding: m.Sharding) -> Any:
        from jax._src import sharding_impls
        from jax._src.lib import xla_client as xc

        if sharding.mesh is not None:
            spec = make_spec(sharding)
            return NamedSharding(self.mesh(sharding.mesh), spec, memory_kind=sharding.memory)
        if sharding.device is not None:
            return SingleDeviceSharding(self._device(sharding.device), memory_kind=sharding.memory)
        if sharding.hlo is None or sharding.positions is None:
            raise ValueError("neither a mesh, a device nor an HLO sharding")
        proto = xc.OpSharding()
        proto.ParseFromString(base64.b64decode(sharding.hlo, validate=True))
        devices = tuple(self._device(p) for p in sharding.positions)
        return sharding_impls.GSPMDSharding(devices, proto, memory_kind=sharding.memory)

    def layout(self, index: int | None) -> Any:
        from jax._src.layout import Layout

        if index is None:
            return None
        layout = self.body.layouts[index]
        return self._make(lambda v: Layout(v.order, v.tiling, v.bits), layout, f"layouts[{index}]")

    def aval(self, leaf: m.Leaf, type_index: int | ellipsis | None = ...) -> Any:  # noqa: F821
        """Returns the abstract value that `leaf` describes; `type_index` replaces the sharding inside it."""
        return self._make(
            lambda v: self._aval(v, v.type if type_index is ... else type_index), leaf, leaf.path
        )

    def _aval(self, leaf: m.Leaf, type_index: int | None) -> Any:
        from jax._src import core
        from jax._src.state.types import AbstractRef

        if leaf.kind == "token":
            return core.abstract_token
        kwargs: dict[str, Any] = {}
        if type_index is not None:
            kwargs["sharding"] = self.sharding(type_index)
        if leaf.space is not None:
            kwargs["memory_space"] = core.MemorySpace[leaf.space]
        if leaf.layout is not None:
            kwargs["layout"] = self.layout(leaf.layout)
        aval = core.ShapedArray(leaf.shape, make_dtype(leaf.dtype), leaf.weak_type, **kwargs)
        return AbstractRef(aval) if leaf.kind == "ref" else aval


def _axis_name(name: Any) -> str:
    if not isinstance(name, str):
        raise NotSerializableError(f"The mesh axis name {name!r} is not a string.")
    return name


def _dimension(dimension: Any, path: str) -> int:
    try:
        return int(dimension)
    except Exception as e:
        raise NotSerializableError(f"{path}: the dimension {dimension} is symbolic.") from e


def _describe_spec(spec: Any) -> dict[str, Any]:
    entries: list[Any] = []
    for entry in spec.partitions if hasattr(spec, "partitions") else spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(m.Unconstrained(unconstrained=True))
        elif isinstance(entry, tuple):
            entries.append(tuple(map(_axis_name, entry)))
        else:
            entries.append(None if entry is None else _axis_name(entry))
    kind = getattr(spec, "unreduced_kind", None)  # since jax 0.11
    return {
        "spec": tuple(entries),
        "unreduced": tuple(sorted(map(_axis_name, getattr(spec, "unreduced", ())))),
        "reduced": tuple(sorted(map(_axis_name, getattr(spec, "reduced", ())))),
        "unreduced_kind": None if kind is None or kind.name == "sum" else kind.name,
    }


def make_spec(sharding: m.Sharding) -> PartitionSpec:
    """Returns the `PartitionSpec` of a named sharding."""
    entries = [
        PartitionSpec.UNCONSTRAINED if isinstance(e, m.Unconstrained) else e for e in sharding.spec
    ]
    kwargs: dict[str, Any] = {}
    if sharding.unreduced:
        kwargs["unreduced"] = frozenset(sharding.unreduced)
    if sharding.reduced:
        kwargs["reduced"] = frozenset(sharding.reduced)
    if sharding.unreduced_kind is not None:
        kwargs["unreduced_kind"] = getattr(jax.sharding, "UnreducedKind")[sharding.unreduced_kind]  # noqa: B009
    return PartitionSpec(*entries, **kwargs)


def describe_dtype(dtype: Any) -> str:
    """Returns the name of a dtype; a random key's is `key<implementation>`."""
    from jax._src import dtypes
    from jax._src.random import prng

    if isinstance(dtype, prng.KeyTy):
        name = dtype._impl.name
        if prng.prngs.get(name) != dtype._impl:
            raise NotSerializableError(f"The PRNG implementation {name!r} is not registered.")
        return f"{_KEY_PREFIX}{name}>"
    if dtypes.issubdtype(dtype, dtypes.extended):
        raise NotSerializableError(f"The extended dtype {dtype} cannot be saved.")
    return "float0" if dtype == dtypes.float0 else np.dtype(dtype).name


def make_dtype(name: str) -> Any:
    """Returns the dtype of a name that `describe_dtype` wrote."""
    from jax._src import dtypes
    from jax._src.random import prng

    if name == "float0":
        return dtypes.float0
    if name.startswith(_KEY_PREFIX):
        implementation = name[len(_KEY_PREFIX) : -1]
        if implementation not in prng.prngs:
            raise ValueError(f"PRNG implementation {implementation!r} is not registered here")
        return prng.KeyTy(prng.prngs[implementation])
    return jax.numpy.dtype(name)


def describe_constant(value: Any) -> tuple[dict[str, Any], bytes]:
    """Returns what rebuilds a constant, and its raw little-endian bytes."""
    aval = jax.typeof(value)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    host = np.ascontiguousarray(np.asarray(value))
    about = {
        "shape": tuple(aval.shape),
        "dtype": describe_dtype(aval.dtype),
        "raw_shape": tuple(host.shape),
        "raw_dtype": describe_dtype(host.dtype),
        "weak_type": bool(aval.weak_type),
    }
    return about, host.tobytes()


# Smaller constants are not worth a file of their own.
_LARGE_NBYTES = 1 << 20


def large_constants(traced: jax.stages.Traced) -> list[memoryview]:
    """Returns the raw bytes of the large constants that a traced function closes over, each once.

    XLA and StableHLO write most of them into their own bytes as they are, so that these can be looked for there.
    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    found: dict[int, memoryview] = {}

    def visit(jaxpr: Any) -> None:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        literals = (atom.val for eqn in inner.eqns for atom in eqn.invars if hasattr(atom, "val"))
        for value in (*getattr(jaxpr, "consts", ()), *literals):
            nbytes = getattr(value, "nbytes", 0)
            if nbytes >= _LARGE_NBYTES and id(value) not in found and _is_at_hand(value):
                host = np.ascontiguousarray(np.asarray(value))
                found[id(value)] = host.reshape(-1).view(np.uint8).data
        for eqn in inner.eqns:
            for value in eqn.params.values():
                for part in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(part, "eqns"):
                        visit(part)

    visit(traced.jaxpr)
    return list(found.values())


def _is_at_hand(value: Any) -> bool:
    """Whether a constant is an array that this process has in whole."""
    if isinstance(value, jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        return value.is_fully_addressable and not is_key
    return isinstance(value, np.ndarray)


def make_constant(constant: m.Constant, raw: bytes) -> Any:
    """Returns a constant from its raw bytes."""
    dtype = np.dtype(make_dtype(constant.raw_dtype))
    expected = int(np.prod(constant.raw_shape, dtype=np.int64)) * dtype.itemsize
    if expected != len(raw):
        raise CorruptArtifactError(
            f"{constant.file}: expected {expected} bytes, found {len(raw)}. Save this step again."
        )
    host = np.frombuffer(raw, dtype).reshape(constant.raw_shape)
    if constant.dtype.startswith(_KEY_PREFIX):
        implementation = constant.dtype[len(_KEY_PREFIX) : -1]
        return jax.random.wrap_key_data(jax.numpy.asarray(host), impl=implementation)
    return host


def abstractify(value: Any) -> Any:
    """Returns the abstract value jit gives to an argument. Raises `TypeError` where it is no array."""
    from jax._src import core

    return core.shaped_abstractify(value)


def is_tracer(value: Any) -> bool:
    from jax._src import core

    return isinstance(value, core.Tracer)


def trace_state_is_clean() -> bool:
    from jax._src import core

    return core.trace_state_clean()


def with_weak_type(array: Any) -> Any:
    """Returns a `jax.Array` over the same buffers whose type is weak."""
    from jax._src import array as array_lib

    if not isinstance(array, array_lib.ArrayImpl) or array.weak_type:
        return array
    aval = array.aval.update(weak_type=True)
    return array_lib.ArrayImpl(
        aval, array.sharding, array._arrays, committed=array._committed, _skip_checks=True
    )

"""Values of JAX: jitted functions, arrays, tree definitions, meshes and shardings.

What belongs to the machine (device ids, counts) is compared elsewhere and is not written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.dtypes
import jax.numpy as jnp
import numpy as np

from orbax_aot._jax import hooks
from orbax_aot.fingerprint.walk import Walk

_MOST_ARRAY_BYTES = 1 << 28


def find_writer(walk: Walk, value: Any) -> Callable[[Walk, Any], None] | None:
    """Who writes this value, if it is one of JAX's."""
    del walk
    if hooks.is_jitted(value):
        return write_jitted
    if hooks.is_jit_information(value):
        return _write_jit_options
    if hooks.is_debug_information(value):
        return _write_nothing
    if hooks.is_cached_function(value):
        return _write_cached_function
    for kinds, writer in _WRITERS:
        if isinstance(value, kinds):
            return writer
    return None


def write_jitted(walk: Walk, jitted: Any) -> None:
    """A jitted function: what it wraps and how it was jitted."""
    walk.visit(jitted.__wrapped__)
    _write_jit_options(walk, jitted)


def _write_nothing(walk: Walk, value: object) -> None:
    """For what says only where something comes from."""


def _write_jit_options(walk: Walk, jitted: Any) -> None:
    for name, option in hooks.jit_options(jitted):
        walk.write(name)
        walk.visit(option)


def _write_cached_function(walk: Walk, function: Any) -> None:
    """A function behind one of JAX's own caches, which some programs use for themselves."""
    walk.visit(function.__wrapped__)
    name = getattr(function.__wrapped__, "__qualname__", "a function")
    filled = function.cache_info().currsize > 0
    walk.note_cacheable(function, f"{name} has cached results from before it was seen" if filled
                        else None)  # fmt: skip


def write_tree_definition(walk: Walk, tree: Any) -> None:
    """A tree definition: its nodes with their static data."""
    node = tree.node_data()
    if node is None:
        walk.write("leaf" if tree.num_leaves else "none")
        return
    kind, data = node
    if kind is dict and all(type(key) is str for key in data):
        walk.write("dict", str(len(data)), *data)
        for key in data:
            walk.mentions.add_text(key)
    elif kind in (tuple, list):
        walk.write(kind.__name__, str(tree.num_nodes))
    else:
        walk.write("node", str(tree.num_nodes))
        walk.visit(kind)
        walk.visit(data)
    for child in tree.children():
        write_tree_definition(walk, child)


def _write_tracer(walk: Walk, value: Any) -> None:
    walk.undecidable("a value of a trace that is under way")


def _write_array(walk: Walk, value: jax.Array) -> None:
    walk.write(str(value.dtype), str(value.shape), str(getattr(value, "weak_type", False)))
    if value.is_deleted():
        walk.undecidable("a deleted array")
        return
    walk.visit(value.sharding)
    walk.write(str(getattr(value, "committed", None)))
    if not value.is_fully_addressable:
        walk.undecidable("an array that is partly on other hosts")
    elif value.nbytes > _MOST_ARRAY_BYTES:
        walk.undecidable(f"an array of {value.nbytes} bytes")
    else:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            walk.write(str(jax.random.key_impl(value)))
            value = jax.random.key_data(value)
        walk.write(hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())


def _write_shape(walk: Walk, value: jax.ShapeDtypeStruct) -> None:
    walk.write(str(value.dtype), str(value.shape), str(getattr(value, "weak_type", False)))
    walk.visit(value.sharding)


def _write_mesh(walk: Walk, value: Any) -> None:
    walk.write("mesh", str(value.axis_names), str(value.axis_sizes), str(value.axis_types))


def _write_spec(walk: Walk, value: Any) -> None:
    walk.write("spec", repr(value))


def _write_named_sharding(walk: Walk, value: jax.sharding.NamedSharding) -> None:
    walk.visit(value.mesh)
    walk.visit(value.spec)
    walk.write(str(value.memory_kind))


def _write_one_device(walk: Walk, value: Any) -> None:
    walk.write("one device", str(value.memory_kind))


def _write_device(walk: Walk, value: Any) -> None:
    walk.undecidable("a device")


_WRITERS: tuple[tuple[Any, Callable[[Walk, Any], None]], ...] = (
    (jax.core.Tracer, _write_tracer),
    (jax.Array, _write_array),
    (jax.ShapeDtypeStruct, _write_shape),
    (jax.tree_util.PyTreeDef, write_tree_definition),
    ((jax.sharding.Mesh, jax.sharding.AbstractMesh), _write_mesh),
    (jax.sharding.PartitionSpec, _write_spec),
    (jax.sharding.NamedSharding, _write_named_sharding),
    (jax.sharding.SingleDeviceSharding, _write_one_device),
    (jax.Device, _write_device),
)

"""What the tests of portable programs share: meshes of eight CPU devices, export, comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_aot.portable import PortableProgram, export_program

DEVICES = np.array(jax.devices())


def mesh_of(*sizes: int, names: Sequence[str] = ("data", "model"), first: int = 0, **options):
    devices = DEVICES[first : first + math.prod(sizes)].reshape(sizes)
    return Mesh(devices, tuple(names), **options)


MESH = mesh_of(2, 4)


def on(*spec: Any, mesh: Mesh = MESH, **options: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec), **options)


def array(shape: Sequence[int], *spec: Any, mesh: Mesh = MESH, dtype: Any = jnp.float32):
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=on(*spec, mesh=mesh))


def exported(fun: Any, *args: Any, platforms: Sequence[str] | None = None, **options: Any) -> bytes:
    return export_program(jax.jit(fun, **options).trace(*args), platforms=platforms)


def program(fun: Any, *args: Any, **options: Any) -> PortableProgram:
    return PortableProgram.parse(exported(fun, *args, **options))


def values_for(avals: Sequence[Any], seed: int = 0) -> list[np.ndarray]:
    """Returns random arrays of these shapes and types."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=aval.shape)).astype(aval.dtype) for aval in avals]


def call(compiled: jax.stages.Compiled, values: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Calls a compiled program with values placed as it wants them."""
    shardings = compiled.input_shardings[0]
    return compiled(*[jax.device_put(v, s) for v, s in zip(values, shardings, strict=True)])


def assert_equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=1e-4, atol=1e-4
        )

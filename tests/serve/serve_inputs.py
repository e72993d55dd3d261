"""What the process that trains and those that serve share: inputs, meshes, digests. Knows no model."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "model")
MORE = 10  # steps after the save


def mesh_of(shape, first=0, axes=AXES, order=None):
    import jax

    count = int(np.prod(shape))
    ids = range(first, first + count) if order is None else order
    return Mesh(np.array([jax.devices()[i] for i in ids]).reshape(shape), axes)


def tokens(number, mesh=None):
    import jax

    rng = np.random.default_rng(100 + number)
    batch = np.cumsum(rng.integers(1, 4, (8, 8)), axis=1).astype(np.int32) % 32
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P("data")))


def features(number, mesh=None):
    import jax

    batch = np.random.default_rng(200 + number).normal(size=(8, 8)).astype(np.float32)
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P("data")))


def bits(value) -> str:
    return np.asarray(value).tobytes().hex()

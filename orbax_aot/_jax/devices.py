"""Devices, clients and compile options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_FEATURES = re.compile(rb"(?:[+-][\w.\-]+,){8,}[+-][A-Za-z][\w.\-]*")
_EMPTY_PROGRAM = "module @orbax_aot_probe { func.func public @main() { return } }"


def is_device(value: Any) -> bool:
    """Whether `value` is a PJRT device. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""
    from jax._src.lib import xla_client as xc

    return isinstance(value, xc.Device)


def make_device_list(devices: Sequence[Any]) -> Any:
    """Returns the native list of `devices`. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""
    from jax._src.lib import xla_client as xc

    return xc.DeviceList(tuple(devices))


def make_compile_options(replicas: int, partitions: int, assignment: np.ndarray) -> Any:
    """Returns native compile options; `assignment` holds device ids, replicas × partitions.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import compiler

    return compiler.get_compile_options(
        num_replicas=replicas, num_partitions=partitions, device_assignment=assignment
    )


def assignment_shape(options: Any) -> tuple[int, int]:
    """Returns (replica count, computation count) of compile options.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    assignment = options.device_assignment
    if assignment is None:
        return int(options.num_replicas), int(options.num_partitions)
    return int(assignment.replica_count()), int(assignment.computation_count())


def with_assignment(options: Any, assignment: np.ndarray) -> Any:
    """Returns a copy of compile options with the device ids of `assignment`, replicas × computations.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src.lib import xla_client as xc

    copy = xc.CompileOptions.ParseFromString(options.SerializeAsString())
    copy.device_assignment = xc.DeviceAssignment.create(assignment)
    return copy


def cpu_features(client: Any) -> str:
    """Returns the CPU features that XLA compiles for on `client`, comma separated; empty off the CPU.

    They are in the serialized topology of the client (jax 0.11.2 and 0.12.0.1). jax 0.10.2 cannot serialize that;
    there they are read from a compiled empty program, which goes past `jax.jit` and costs about 20 ms.
    """
    if client.platform != "cpu":
        return ""
    from jax._src.lib import _jax

    devices = client.local_devices()[:1]
    topology = _jax.get_topology_for_devices(devices)
    if hasattr(type(topology), "serialize"):
        data = bytes(topology.serialize())
    else:
        options = make_compile_options(1, 1, np.array([[devices[0].id]]))
        program = client.compile_and_load(_EMPTY_PROGRAM, make_device_list(devices), options)
        data = bytes(client.serialize_executable(program))
    found = _FEATURES.search(data)
    if found is None:
        raise RuntimeError("XLA does not say which CPU features it compiles for")
    features = found.group().decode().split(",")
    return ",".join(sorted(f[1:] for f in features if f.startswith("+")))


def register_lapack() -> None:
    """Gives jaxlib's LAPACK kernels their function pointers; imports scipy (about 0.45 s).

    jaxlib does so when a program is lowered. A process that only loads executables would jump to address 0 at the
    first LAPACK call. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src.lib import lapack

    lapack._lapack.initialize()


def flags_that_do_not_matter() -> frozenset[str]:
    """Returns the names of XLA flags that JAX's own compilation cache ignores.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import cache_key

    names = cache_key.xla_flags_to_exclude_from_cache_key
    return frozenset(name.lstrip("-") for name in names)

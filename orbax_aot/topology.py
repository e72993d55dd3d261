"""What a machine is: its devices, its software and the settings a compiled program depends on."""

from __future__ import annotations

import functools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib.version

from orbax_aot import manifest as m
from orbax_aot import plan
from orbax_aot._jax import config as config_lib
from orbax_aot._jax import devices as devices_lib
from orbax_aot._jax import topologies as topologies_lib
from orbax_aot.errors import ClientMismatchError, DeviceTypeError

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def require_devices(devices: Sequence[Any], backend: Any = None) -> tuple[Any, ...]:
    """Returns `devices` as a tuple, all of one client, which is `backend` where that is given.

    Raises:
      DeviceTypeError: something in the list is no device, or the list is empty.
      ClientMismatchError: the devices belong to another client than `backend`, or to several.
    """
    if not isinstance(devices, list | tuple) and not hasattr(devices, "__iter__"):
        raise DeviceTypeError(f"execution_devices must be a list of xc.Device. Got: {devices!r}")
    devices = tuple(devices)
    if not devices or not all(devices_lib.is_device(d) for d in devices):
        raise DeviceTypeError(
            f"execution_devices must be a list of xc.Device. Got: {list(devices)!r}"
        )
    client = devices[0].client if backend is None else backend
    for device in devices:
        if device.client is not client and device.client != client:
            raise ClientMismatchError(
                "Execution devices belong to a client other than `backend`. Got backend client: "
                f"{(client.platform, client.platform_version)} and execution devices client: "
                f"{(device.client.platform, device.client.platform_version)}"
            )
    return devices


def describe_devices(
    devices: Sequence[Any], *, replicas: int = 1, partitions: int | None = None
) -> m.Topology:
    """Describes devices, in the given order. `partitions` defaults to one for each device."""
    client = devices[0].client
    coords = tuple(getattr(d, "coords", None) for d in devices)
    return m.Topology(
        platform=str(client.platform),
        platform_version=str(client.platform_version),
        device_kind=_one_kind(devices),
        count=len(devices),
        replicas=replicas,
        partitions=len(devices) if partitions is None else partitions,
        coords=None if None in coords else tuple(tuple(map(int, c or ())) for c in coords),
        ids=tuple(int(d.id) for d in devices),
        processes=tuple(int(d.process_index) for d in devices),
    )


def _one_kind(devices: Sequence[Any]) -> str:
    return "+".join(sorted({str(d.device_kind) for d in devices}))


def describe_environment(client: Any, options: Mapping[str, Any] | None = None) -> m.Environment:
    """Describes the software and settings of this process; `options` are a function's `compiler_options`."""
    return m.Environment(
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        cpu_features=_cpu_features(client),
        xla_flags=xla_flags(),
        config=config_lib.global_config(),
        options=dict(options or {}),
    )


@functools.lru_cache(maxsize=4)
def _cpu_features(client: Any) -> str:
    return devices_lib.cpu_features(client)


def xla_flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the XLA flags in effect that can change a compiled program, by name.

    Flags that only dump, and those that JAX's own compilation cache ignores (the number of fake host devices among
    them), are left out.
    """
    try:
        ignored = devices_lib.flags_that_do_not_matter()
    except (ImportError, AttributeError):
        ignored = frozenset({"xla_force_host_platform_device_count"})
    flags = {}
    for variable in _FLAG_VARIABLES:
        try:
            words = shlex.split(environ.get(variable, ""))
        except ValueError:
            words = environ.get(variable, "").split()
        for word in words:
            name, _, value = word.lstrip("-").partition("=")
            if name not in ignored and not name.startswith("xla_dump"):
                flags[name] = value
    return flags


def describe_machine(client: Any | None = None) -> plan.Machine:
    """Describes the devices of this job, in the client's order, and this process."""
    here: Any = jax.devices()[0].client if client is None else client
    devices = here.devices()
    return plan.Machine(
        topology=describe_devices(devices),
        kinds=tuple(str(d.device_kind) for d in devices),
        environment=describe_environment(here),
        process=int(here.process_index()),
    )


def devices_here() -> tuple[Any, ...]:
    """Returns the devices that `describe_machine` describes, in its order."""
    return tuple(jax.devices()[0].client.devices())


def is_here(device: Any) -> bool:
    """Whether a device can run something, and is not one of a topology to compile for."""
    return not topologies_lib.is_compile_only(device.client)


def describe_absent_machine(devices: Sequence[Any]) -> plan.Machine:
    """Describes a machine that has these devices and no others, seen from the process of the first."""
    return plan.Machine(
        topology=describe_devices(devices),
        kinds=tuple(str(d.device_kind) for d in devices),
        environment=describe_environment(devices[0].client),
        process=int(devices[0].process_index),
    )


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Lays a mesh over devices as a job on them does by `jax.make_mesh`, whose order may follow the wiring.

    Raises:
      ValueError: there are fewer devices, or more.
    """
    size = math.prod(axes.values())
    if size != len(devices):
        raise ValueError(f"A mesh of {size} devices over {len(devices)} devices.")
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices)


def mesh_of_tree(tree: Any) -> jax.sharding.Mesh | None:
    """Returns the mesh of the largest size among the shardings of a tree's leaves; None without one."""
    return mesh_of_shardings([getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)])


def mesh_of_shardings(shardings: Sequence[Any]) -> jax.sharding.Mesh | None:
    """Returns the mesh of the largest size among `shardings`; None without one."""
    best = None
    for sharding in shardings:
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and (best is None or mesh.size > best.size):
            best = mesh
    return best

"""Devices to compile for that are not here: CPUs in any number; TPUs and GPUs where their plugins are installed.

Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

# Without these, libtpu asks the cloud's metadata server what it runs on, and waits for the answer.
_OFFLINE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}


@functools.lru_cache(maxsize=8)
def make_cpu_devices(count: int) -> tuple[Any, ...]:
    """Returns `count` CPU devices of a client of their own, whatever number the process was started with."""
    from jax._src.lib import xla_client as xc

    return tuple(xc.make_cpu_client(asynchronous=True, num_devices=count).devices())


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def make_tpu_devices(name: str) -> tuple[Any, ...]:
    """Returns the devices of a TPU topology such as `v5e:2x4`: to compile for, not to run on.

    Raises:
      ValueError: libtpu does not know it; the message is libtpu's.
    """
    from jax.experimental import topologies

    with _offline():
        try:
            described = topologies.get_topology_desc(platform="tpu", topology_name=name)
        except Exception as e:  # jaxlib's own error type, for all that libtpu refuses
            raise ValueError(str(e)) from e
    return tuple(described.devices)


def make_cuda_devices(target_config: str, count: int) -> tuple[Any, ...]:
    """Returns `count` GPUs of one host, of the kind that a text of XLA's `GpuTargetConfigProto` describes.

    Needs JAX's CUDA plugin, and no GPU.

    Raises:
      ValueError: there is no such plugin, or it refuses the description; the message is JAX's.
    """
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="cuda",
            topology=f"1x1x{count}",
            target_config=target_config,
        )
    except Exception as e:
        raise ValueError(str(e)) from e
    return tuple(described.devices)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    missing = {name: value for name, value in _OFFLINE.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def is_compile_only(client: Any) -> bool:
    """Whether a client can compile and not run anything."""
    return type(client).__name__ == "CompileOnlyPyClient"

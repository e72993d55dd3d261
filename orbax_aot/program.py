"""The digest of a lowered program: is this still the program that was compiled?"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbax_aot import errors
from orbax_aot._jax import mlir


def program_digest(lowered_or_module: jax.stages.Lowered | mlir.Module | bytes | str) -> str:
    """Returns `"sha256:…"` of a program, normalised; equal over processes on one JAX version.

    Function names, locations, names of results, and whether the arguments of a one-device
    program (or scalars) are committed do not count. Everything else in the module does; of a
    `jax.stages.Lowered` also what the module does not say: platforms, which arguments are kept
    and donated, the types of outputs (weak types included), compiler options and the values of
    constants that were hoisted out of the module. Weak types of inputs count only through what
    they change.

    Takes about 0.1 s for the training step of a 24-layer transformer; on the calling thread.

    Args:
        lowered_or_module: a lowered function, or its module (also as MLIR bytecode or text).

    Raises:
        NotSerializableError: a hoisted constant is spread over other processes.
    """
    digest = hashlib.sha256()
    if isinstance(lowered_or_module, jax.stages.Lowered):
        parts = mlir.describe_lowered(lowered_or_module)
        code: bytes | str = mlir.to_bytecode(parts.module)
        _update(digest, json.dumps(parts.facts, sort_keys=True).encode())
        for constant in parts.constants:
            _update(digest, *_constant_bytes(constant))
    elif isinstance(lowered_or_module, bytes | str):
        code = lowered_or_module
    else:
        code = mlir.to_bytecode(lowered_or_module)
    _update(digest, _normalised(code))
    return f"sha256:{digest.hexdigest()}"


def _normalised(code: bytes | str) -> bytes:
    with mlir.parsed(code) as module:
        mlir.strip_names(module)
        mlir.strip_commitment(module)
        return mlir.to_bytecode(module)


def _update(digest: Any, *parts: bytes) -> None:
    """Adds byte strings to a digest, each behind its length so that none runs into the next."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _constant_bytes(constant: Any) -> tuple[bytes, bytes]:
    """Returns the type and the value of one hoisted constant."""
    if isinstance(constant, jax.Array):
        kind = str(constant.dtype)
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        if not constant.is_fully_addressable:
            if not constant.is_fully_replicated:
                raise errors.NotSerializableError(
                    f"A constant of the program ({kind}{list(constant.shape)}) is spread over "
                    "several processes, so no process can take its digest. Pass it as an argument."
                )
            constant = constant.addressable_data(0)
    else:
        kind = type(constant).__name__
    value = np.ascontiguousarray(np.asarray(constant))
    described = json.dumps([kind, str(value.dtype), list(value.shape)])
    return described.encode(), value.tobytes()

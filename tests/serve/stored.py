"""What lies in a checkpoint, and changing it as a newer or a hostile writer would."""

from __future__ import annotations

from pathlib import Path

import msgspec

from orbax_aot import manifest as m
from orbax_aot.store import Store, pack


def store_of(path, step) -> Store:
    return Store(Path(path) / str(step) / "default")


def body_of(path, step=1) -> m.Body:
    return store_of(path, step).read_manifest().body


def signatures_of(path, name, step=1) -> tuple[m.Signature, ...]:
    return body_of(path, step).functions[name].signatures


def read_portable(path, name, step=1) -> bytes:
    """Returns the raw StableHLO of a function of one signature."""
    import zstandard

    function = body_of(path, step).functions[name]
    (signature,) = function.signatures
    stored = store_of(path, step).read(
        f"{function.folder}/{signature.folder}/{signature.portable.file}", signature.portable
    )
    return zstandard.ZstdDecompressor().decompress(stored)


def replace_portable(path, name, data: bytes, step=1) -> None:
    """Stores other StableHLO for a function of one signature; all digests fit."""
    store, body = store_of(path, step), body_of(path, step)
    function = body.functions[name]
    (signature,) = function.signatures
    stored, fields = pack(data)
    portable = msgspec.structs.replace(signature.portable, **fields)
    store.write(f"{function.folder}/{signature.folder}/{portable.file}", stored)
    signature = msgspec.structs.replace(signature, portable=portable)
    function = msgspec.structs.replace(function, signatures=(signature,))
    functions = {**body.functions, name: function}
    store.write_manifest(msgspec.structs.replace(body, functions=functions))


def age_portable(path, name, step=1) -> None:
    """Makes a function's StableHLO look as if a JAX of years to come had written it."""
    import dataclasses

    import jax

    exported = jax.export.deserialize(bytearray(read_portable(path, name, step)))
    newer = dataclasses.replace(exported, calling_convention_version=99)
    replace_portable(path, name, bytes(newer.serialize()), step)


def damage_portable(path, name, step=1) -> None:
    """Flips a byte in the stored file of a function's StableHLO; the manifest stays as it is."""
    function = body_of(path, step).functions[name]
    (signature,) = function.signatures
    file = (
        store_of(path, step).folder / function.folder / signature.folder / signature.portable.file
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

"""A signature with its stored bytes: what lies between an `Executable` and an `_aot` folder."""

from __future__ import annotations

import dataclasses

import msgspec

from orbax_aot import manifest as m
from orbax_aot import store as store_lib
from orbax_aot.executable import PartiallySerialized


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One signature, packed.

    `signature` and the tables of `body` belong together; file names in it are those of `files`, which holds the
    stored (compressed) bytes. Writing it again costs no compression.
    """

    signature: m.Signature
    body: m.Body
    files: dict[str, bytes]

    @property
    def variant(self) -> m.Variant:
        return self.signature.variants[0]

    def write(self, store: store_lib.Store, tables: m.Tables, folder: str) -> m.Signature:
        """Writes the files below `folder` (constants beside all functions); returns the manifest's entry."""
        signature = tables.adopt_signature(self.signature, self.body)
        for variant in signature.variants:
            store.write(f"{folder}/{variant.file}", self.files[variant.file])
            for constant in variant.constants:
                if not (store.folder / constant.file).exists():
                    store.write(constant.file, self.files[constant.file])
        if signature.portable is not None:
            store.write(f"{folder}/{signature.portable.file}", self.files[signature.portable.file])
        return msgspec.structs.replace(signature, folder=folder.rpartition("/")[2])

    def unpack(self, where: str) -> PartiallySerialized:
        """Returns the raw form, each digest checked. Raises `CorruptArtifactError`."""
        variant = self.variant
        payload = store_lib.unpack(self.files[variant.file], variant, f"{where}/{variant.file}")
        constants = tuple(
            store_lib.unpack(self.files[c.file], c, c.file) for c in variant.constants
        )
        return PartiallySerialized(self.signature, self.body, payload, constants)


def pack(serialized: PartiallySerialized) -> Artifact:
    """Compresses a serialized function."""
    files: dict[str, bytes] = {}
    variant = serialized.variant
    stored, fields = store_lib.pack(serialized.payload)
    files["0.pjrt.zst"] = stored
    constants = []
    for constant, raw in zip(variant.constants, serialized.constants, strict=True):
        packed, about = store_lib.pack(raw)
        name = f"{store_lib.CONSTANTS}/{about['raw_sha256']}.zst"
        files[name] = packed
        constants.append(msgspec.structs.replace(constant, file=name, **about))
    variant = msgspec.structs.replace(
        variant, file="0.pjrt.zst", constants=tuple(constants), **fields
    )
    signature = msgspec.structs.replace(serialized.signature, variants=(variant,))
    return Artifact(signature, serialized.body, files)


def read(
    store: store_lib.Store, body: m.Body, function: m.Function, signature: m.Signature, index: int
) -> Artifact:
    """Reads one variant of a signature, its sizes checked; digests are checked by `Artifact.unpack`.

    Raises:
      CorruptArtifactError: a file is missing or has another size.
    """
    variant = signature.variants[index]
    folder = f"{function.folder}/{signature.folder}"
    files = {variant.file: store.read(f"{folder}/{variant.file}", variant)}
    for constant in variant.constants:
        files[constant.file] = store.read(constant.file, constant)
    only = msgspec.structs.replace(signature, variants=(variant,), portable=None)
    return Artifact(only, body, files)

"""A signature with its stored bytes: what lies between an `Executable` and an `_aot` folder."""

from __future__ import annotations

import dataclasses

import msgspec

from orbax_aot import deadline
from orbax_aot import manifest as m
from orbax_aot import store as store_lib
from orbax_aot import trust
from orbax_aot.errors import CorruptArtifactError, UntrustedArtifactError
from orbax_aot.executable import PartiallySerialized

_PORTABLE = "portable.stablehlo.zst"
_VARIANT = ".pjrt.zst"


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

    def with_portable(
        self,
        data: bytes | None,
        absent: m.Absent | None = None,
        platforms: tuple[str, ...] = (),
    ) -> Artifact:
        """Returns the artifact with the StableHLO `data`, or with the reason why it has none."""
        if data is None:
            signature = msgspec.structs.replace(self.signature, portable_absent=absent)
            return dataclasses.replace(self, signature=signature)
        stored, fields = store_lib.pack(data)
        portable = m.Portable(file=_PORTABLE, platforms=platforms, **fields)
        signature = msgspec.structs.replace(self.signature, portable=portable)
        return dataclasses.replace(
            self, signature=signature, files={**self.files, _PORTABLE: stored}
        )

    def as_variant_of(self, signature: m.Signature, body: m.Body) -> Artifact:
        """Returns the artifact told as one more variant of `signature`, whose tables are those of `body`."""
        tables = m.Tables()
        only = msgspec.structs.replace(signature, variants=(), portable=None, portable_absent=None)
        saved = tables.adopt_signature(only, body)
        own = tables.adopt_signature(self.signature, self.body)
        return Artifact(
            msgspec.structs.replace(saved, variants=own.variants),
            tables.body(),
            self.files,
        )

    def with_variants_of(self, other: Artifact) -> Artifact:
        """Returns the artifact with the variants of `other` behind its own: the same signature for other places.

        A variant for a place that it has one for already is superseded, and left out.
        """
        tables = m.Tables()
        own = tables.adopt_signature(self.signature, self.body)
        theirs = tables.adopt_signature(other.signature, other.body)
        places = [(v.topology, v.environment) for v in own.variants]
        files = {k: v for k, v in self.files.items() if not k.endswith(_VARIANT)}
        variants = []
        for source, variant in (
            *((self, v) for v in own.variants),
            *((other, v) for v in theirs.variants if (v.topology, v.environment) not in places),
        ):
            name = f"{len(variants)}{_VARIANT}"
            files[name] = source.files[variant.file]
            files.update({c.file: source.files[c.file] for c in variant.constants})
            variants.append(msgspec.structs.replace(variant, file=name))
        return Artifact(
            msgspec.structs.replace(own, variants=tuple(variants)), tables.body(), files
        )

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
    files[f"0{_VARIANT}"] = stored
    constants = []
    for constant, raw in zip(variant.constants, serialized.constants, strict=True):
        packed, about = store_lib.pack(raw)
        name = f"{store_lib.CONSTANTS}/{about['raw_sha256']}.zst"
        files[name] = packed
        constants.append(msgspec.structs.replace(constant, file=name, **about))
    variant = msgspec.structs.replace(
        variant, file=f"0{_VARIANT}", constants=tuple(constants), **fields
    )
    signature = msgspec.structs.replace(serialized.signature, variants=(variant,))
    return Artifact(signature, serialized.body, files)


@dataclasses.dataclass(frozen=True)
class SavedSignature:
    """One signature of a checkpoint, to be read piece by piece."""

    store: store_lib.Store
    body: m.Body
    function: m.Function
    signature: m.Signature
    standing: trust.Standing = trust.Standing()
    timeout_secs: float = 600.0

    @property
    def is_confined(self) -> bool:
        """Whether its StableHLO comes from no trusted source."""
        return self.standing.confined

    @property
    def portable(self) -> m.Portable | None:
        """The StableHLO, where it may be used."""
        return None if self.standing.portable else self.signature.portable

    def _read(self, name: str, file: m.File, admit: store_lib.Admit | None = None) -> bytes:
        """Reads a stored file; a file system that hangs holds nobody back for longer than `timeout_secs`."""
        read = lambda: self.store.read(name, file, admit)
        return deadline.within(self.timeout_secs, read, f"reading {name}")

    def _name(self, file: str) -> str:
        return f"{self.function.folder}/{self.signature.folder}/{file}"

    def read_variant(self, index: int) -> Artifact:
        """Reads one variant, its sizes checked; digests are checked by `Artifact.unpack`.

        Raises:
          CorruptArtifactError: a file is missing or has another size.
          UntrustedArtifactError: the manifest, or a file, is not trusted.
          TimeoutError: reading takes too long.
          OSError: a file cannot be read.
        """
        if self.standing.native:
            raise UntrustedArtifactError(self.standing.native)
        variant = self.signature.variants[index]
        admit = self.standing.admit
        files = {variant.file: self._read(self._name(variant.file), variant, admit)}
        for constant in variant.constants:
            files[constant.file] = self._read(constant.file, constant, admit)
        only = msgspec.structs.replace(self.signature, variants=(variant,), portable=None)
        return Artifact(only, self.body, files)

    def read_portable(self) -> bytes:
        """Reads the StableHLO, both digests checked. Raises `CorruptArtifactError`."""
        portable = self.portable
        assert portable is not None
        name = self._name(portable.file)
        return store_lib.unpack(self._read(name, portable), portable, name)

    def complete(self, artifact: Artifact, skip: int | None) -> Artifact:
        """Adds what this signature has besides the variant `skip`, as far as it can still be read and is trusted.

        The step it came from may have been deleted since; then what is at hand is all there is.
        """
        for index in range(len(self.signature.variants)):
            if index != skip:
                try:
                    other = self.read_variant(index)
                    other.unpack(self._name(other.variant.file))
                except (CorruptArtifactError, UntrustedArtifactError, OSError):
                    continue
                artifact = artifact.with_variants_of(other)
        portable = self.portable
        if portable is not None:
            try:
                stored = self._read(self._name(portable.file), portable)
            except (CorruptArtifactError, OSError):
                return artifact
            portable = msgspec.structs.replace(portable, file=_PORTABLE)
            signature = msgspec.structs.replace(artifact.signature, portable=portable)
            files = {**artifact.files, _PORTABLE: stored}
            artifact = dataclasses.replace(artifact, signature=signature, files=files)
        return artifact

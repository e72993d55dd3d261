"""A signature with its stored bytes: what lies between an `Executable` and an `_aot` folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orbax_aot import deadline, trust
from orbax_aot import manifest as m
from orbax_aot import store as store_lib
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
            self._write_shared(store, variant.shared)
        if signature.portable is not None:
            store.write(f"{folder}/{signature.portable.file}", self.files[signature.portable.file])
            self._write_shared(store, signature.portable.cuts)
        return msgspec.structs.replace(signature, folder=folder.rpartition("/")[2])

    def _write_shared(self, store: store_lib.Store, shared: Sequence[m.File]) -> None:
        for file in shared:
            if not (store.folder / file.file).exists():
                store.write(file.file, self.files[file.file])

    def named_by_content(self) -> Artifact:
        """Returns the artifact with file names that tell apart what differs, for a folder that holds others already."""
        names = {v.file: f"{v.sha256[:16]}{_VARIANT}" for v in self.signature.variants}
        variants = tuple(
            msgspec.structs.replace(v, file=names[v.file]) for v in self.signature.variants
        )
        portable = self.signature.portable
        if portable is not None:
            names[portable.file] = f"{portable.sha256[:16]}.stablehlo.zst"
            portable = msgspec.structs.replace(portable, file=names[portable.file])
        signature = msgspec.structs.replace(self.signature, variants=variants, portable=portable)
        files = {names.get(name, name): stored for name, stored in self.files.items()}
        return Artifact(signature, self.body, files)

    def with_portable(
        self,
        data: bytes | None,
        absent: m.Absent | None = None,
        platforms: tuple[str, ...] = (),
        shared: Sequence[memoryview] = (),
    ) -> Artifact:
        """Returns the artifact with the StableHLO `data`, or with the reason why it has none.

        What is in `shared` is stored beside all functions.
        """
        if data is None:
            signature = msgspec.structs.replace(self.signature, portable_absent=absent)
            return dataclasses.replace(self, signature=signature)
        files, fields = _pack_cut(_PORTABLE, data, shared)
        portable = m.Portable(platforms=platforms, **fields)
        signature = msgspec.structs.replace(self.signature, portable=portable)
        return dataclasses.replace(self, signature=signature, files={**self.files, **files})

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

        A variant for a place that it has one for already is superseded, and left out. Meshes of other shapes may
        have the same devices; it is the shardings that tell them apart.
        """
        tables = m.Tables()
        own = tables.adopt_signature(self.signature, self.body)
        theirs = tables.adopt_signature(other.signature, other.body)
        places = [place_of(v) for v in own.variants]
        files = {k: v for k, v in self.files.items() if not k.endswith(_VARIANT)}
        variants = []
        for source, variant in (
            *((self, v) for v in own.variants),
            *((other, v) for v in theirs.variants if place_of(v) not in places),
        ):
            name = f"{len(variants)}{_VARIANT}"
            files[name] = source.files[variant.file]
            files.update({f.file: source.files[f.file] for f in variant.shared})
            variants.append(msgspec.structs.replace(variant, file=name))
        return Artifact(
            msgspec.structs.replace(own, variants=tuple(variants)), tables.body(), files
        )

    def unpack(self, where: str) -> PartiallySerialized:
        """Returns the raw form, each digest checked. Raises `CorruptArtifactError`."""
        variant = self.variant
        payload = _unpack_cut(self.files, variant, f"{where}/{variant.file}")
        constants = tuple(
            store_lib.unpack(self.files[c.file], c, c.file) for c in variant.constants
        )
        return PartiallySerialized(self.signature, self.body, payload, constants)


def place_of(variant: m.Variant) -> tuple[Any, ...]:
    """Returns what tells variants of one signature apart, whose shardings are of the same tables."""
    return variant.topology, variant.environment, variant.in_shardings, variant.out_shardings


def _pack_shared(raw: bytes) -> tuple[bytes, dict[str, Any]]:
    """Compresses what lies beside all functions; returns the bytes to store and the fields of `manifest.File`."""
    stored, fields = store_lib.pack(raw)
    return stored, {"file": f"{store_lib.CONSTANTS}/{fields['raw_sha256']}.zst", **fields}


def _pack_cut(
    name: str, raw: bytes, shared: Sequence[memoryview]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Compresses `raw` without what is in `shared`; returns the files and the fields of `manifest.CutFile`."""
    rest, parts = store_lib.cut(raw, shared)
    stored, fields = store_lib.pack(rest)
    files, cuts = {name: stored}, []
    for at, part in parts:
        stored, about = _pack_shared(part)
        files[about["file"]] = stored
        cuts.append(m.Cut(at=at, **about))
    if cuts:
        fields |= {"raw_sha256": store_lib.digest(raw), "raw_nbytes": len(raw)}
    return files, {"file": name, "cuts": tuple(cuts), **fields}


def _unpack_cut(files: Mapping[str, bytes], file: m.CutFile, where: str) -> bytes:
    """Returns the raw bytes of a file with what was cut out of it, each digest checked."""
    parts = [(c.at, store_lib.unpack(files[c.file], c, c.file)) for c in file.cuts]
    return store_lib.unpack(files[file.file], file, where, parts)


def pack(serialized: PartiallySerialized, shared: Sequence[memoryview] = ()) -> Artifact:
    """Compresses a serialized function. What is in `shared` is stored beside all functions, once."""
    variant = serialized.variant
    files, fields = _pack_cut(f"0{_VARIANT}", serialized.payload, shared)
    constants = []
    for constant, raw in zip(variant.constants, serialized.constants, strict=True):
        stored, about = _pack_shared(raw)
        files[about["file"]] = stored
        constants.append(msgspec.structs.replace(constant, **about))
    variant = msgspec.structs.replace(variant, constants=tuple(constants), **fields)
    signature = msgspec.structs.replace(serialized.signature, variants=(variant,))
    return Artifact(signature, serialized.body, files)


_TRUSTED = trust.Standing()


@dataclasses.dataclass(frozen=True)
class SavedSignature:
    """One signature of a checkpoint, to be read piece by piece."""

    store: store_lib.Store
    body: m.Body
    function: m.Function
    signature: m.Signature
    standing: trust.Standing = _TRUSTED
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
        files |= {file.file: self._read(file.file, file, admit) for file in variant.shared}
        only = msgspec.structs.replace(self.signature, variants=(variant,), portable=None)
        return Artifact(only, self.body, files)

    def read_portable(self) -> bytes:
        """Reads the StableHLO, both digests checked. Raises `CorruptArtifactError`."""
        portable = self.portable
        assert portable is not None
        return _unpack_cut(self._read_portable_files(portable), portable, self._name(portable.file))

    def _read_portable_files(self, portable: m.Portable) -> dict[str, bytes]:
        files = {portable.file: self._read(self._name(portable.file), portable)}
        return files | {cut.file: self._read(cut.file, cut) for cut in portable.cuts}

    def read_others(self, skip: int | None) -> Others:
        """Reads what this signature has besides the variant `skip`, as far as it can still be read and is trusted.

        The step it came from may have been deleted since; then what is at hand is all there is.
        """
        variants = []
        for index in range(len(self.signature.variants)):
            if index != skip:
                try:
                    other = self.read_variant(index)
                    other.unpack(self._name(other.variant.file))
                except (CorruptArtifactError, UntrustedArtifactError, OSError):
                    continue
                variants.append(other)
        portable, absent = self.portable, self.signature.portable_absent
        files: dict[str, bytes] = {}
        if portable is not None:
            try:
                files = self._read_portable_files(portable)
            except (CorruptArtifactError, OSError) as e:
                portable = None
                absent = m.Absent(code="NOT_SAVED", detail=f"{e}"[:300])
        return Others(tuple(variants), portable, files, absent)


@dataclasses.dataclass(frozen=True)
class Others:
    """What a signature of a checkpoint has besides the variant in use: other variants, and StableHLO or why not."""

    variants: tuple[Artifact, ...]
    portable: m.Portable | None
    portable_files: dict[str, bytes]
    portable_absent: m.Absent | None

    def join(self, artifact: Artifact) -> Artifact:
        """Returns `artifact`, the variant in use, with the others."""
        for other in self.variants:
            artifact = artifact.with_variants_of(other)
        files, portable = artifact.files, self.portable
        if portable is not None:
            stored = dict(self.portable_files)
            stored[_PORTABLE] = stored.pop(portable.file)
            portable = msgspec.structs.replace(portable, file=_PORTABLE)
            files = {**files, **stored}
        signature = msgspec.structs.replace(
            artifact.signature, portable=portable, portable_absent=self.portable_absent
        )
        return dataclasses.replace(artifact, signature=signature, files=files)

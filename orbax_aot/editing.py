"""Changing what a committed step holds, safely against concurrent readers. Imports no jax.

Files are never changed once written: new ones get names that tell their content, then the manifest is replaced in
one step. What the old manifest named and the new one does not is left for `prune`, so that a reader who has read the
old one still finds it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from etils import epath

from orbax_aot import locations
from orbax_aot import manifest as m
from orbax_aot import store as store_lib
from orbax_aot.errors import AotError

if TYPE_CHECKING:
    from orbax_aot import artifact as artifact_lib

# Files that no manifest names may be a writer's who has not replaced the manifest yet.
_ORPHAN_AGE_SECS = 3600.0


class Edit:
    """A change to the manifest of a committed step: functions are replaced one by one, then all at once on disk."""

    def __init__(self, item: epath.PathLike):
        """Reads the manifest of `item`, where there is one.

        Raises:
          AotError: it was written by a newer version, whose additions a change would lose.
          CorruptArtifactError: it is damaged.
        """
        self.store = store_lib.Store(item)
        self.before = self.store.read_manifest() if self.store.exists() else None
        if self.before is not None and self.before.version > m.FORMAT_VERSION:
            version = ".".join(map(str, self.before.version))
            raise AotError(
                f"{self.before.path}: written in format {version} by a newer orbax-aot; update it to change the step."
            )
        self.body = m.Body() if self.before is None else self.before.body
        self.tables = m.Tables()
        self.functions = {
            name: self.tables.adopt_function(function, self.body)
            for name, function in self.body.functions.items()
        }

    def add_files(self, artifact: artifact_lib.Artifact, folder: str) -> m.Signature:
        """Writes an artifact's files below `folder`; returns its signature over the tables of the new manifest."""
        artifact = artifact.named_by_content()
        signature = self.tables.adopt_signature(artifact.signature, artifact.body)
        for name, stored in artifact.files.items():
            is_shared = name.startswith(f"{store_lib.CONSTANTS}/")
            self.store.write_new(name if is_shared else f"{folder}/{name}", stored)
        return msgspec.structs.replace(signature, folder=folder.rpartition("/")[2])

    def result(self, created_by: dict[str, str] | None = None) -> m.Body:
        """Returns the body of the new manifest."""
        tables = m.Tables()  # without what only the replaced functions needed
        middle = self.tables.body()
        functions = {
            name: tables.adopt_function(function, middle)
            for name, function in self.functions.items()
        }
        body = msgspec.structs.replace(
            self.body, created_by=self.body.created_by or created_by or {}
        )
        return m.rebuilt(body, functions, tables)

    def commit(self, created_by: dict[str, str] | None = None) -> m.Manifest:
        """Replaces the manifest and returns it.

        Raises:
          StepChangedError: another writer was faster; nothing has changed.
        """
        body = self.result(created_by)
        self.store.replace_manifest(body, self.before)
        return self.store.read_manifest()


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What `prune` dropped, or would: `parts` as people name them, `files` below `_aot` with their sizes in bytes."""

    parts: tuple[str, ...]
    files: dict[str, int]
    dry_run: bool

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def prune(
    path: epath.PathLike,
    *,
    functions: Sequence[str] | None = None,
    variants: Sequence[str] = (),
    platforms: Sequence[str] = (),
    portable: bool = False,
    unused: bool = False,
    dry_run: bool = True,
) -> Pruned:
    """Drops executables or StableHLO from a committed step, and files that nothing refers to.

    The weights and the descriptions of the functions stay. The manifest is replaced first, in one step; a reader that
    had read the old one and finds a file gone recompiles, with the reason `CORRUPT`.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      functions: drop only from these; by default from all.
      variants: drop these, named "function/signature/variant" by the numbers that `inspect` shows.
      platforms: drop all variants for these, such as "tpu".
      portable: drop the StableHLO.
      unused: drop files that nothing refers to whatever their age; by default only those older than an hour, since
        younger ones may be those of a writer at work. Signing and verifying want none.
      dry_run: change nothing, only say what would be dropped.

    Raises:
      NoExecutablesError, CorruptArtifactError: as `inspect`.
      KeyError: a function or a variant that is not there.
    """
    edit = Edit(locations.find_item(path))
    for name in functions or ():
        if name not in edit.functions:
            raise KeyError(f"no function {name!r} there, only {sorted(edit.functions)}")
    unknown = [v for v in variants if v not in _variant_names(edit.body)]
    if unknown:
        raise KeyError(f"no variant {unknown[0]!r} there, only {_variant_names(edit.body)}")
    parts: list[str] = []
    for name, function in edit.functions.items():
        if functions is not None and name not in functions:
            continue

        def is_dropped(where: str, variant: m.Variant) -> bool:
            return where in variants or variant.topology.platform in platforms

        edit.functions[name] = _thin(name, function, is_dropped, portable, parts)
    body = edit.result()
    kept = m.files_of(body)
    named = m.files_of(edit.body)
    files = {
        file: nbytes
        for file, nbytes in edit.store.list_files().items()
        if file not in kept and (file in named or unused or _is_old(edit.store, file))
    }
    if not dry_run:
        if parts:
            edit.commit()
        for file in files:
            edit.store.remove(file)
    return Pruned(tuple(parts), files, dry_run)


def _variant_names(body: m.Body) -> list[str]:
    return [
        f"{name}/{i}/{j}"
        for name, function in sorted(body.functions.items())
        for i, signature in enumerate(function.signatures)
        for j in range(len(signature.variants))
    ]


def _thin(
    name: str,
    function: m.Function,
    is_dropped: Callable[[str, m.Variant], bool],
    portable: bool,
    parts: list[str],
) -> m.Function:
    """Returns a function without what is dropped, whose names are added to `parts`."""
    signatures = []
    for i, signature in enumerate(function.signatures):
        kept = []
        for j, variant in enumerate(signature.variants):
            where = f"{name}/{i}/{j}"
            if is_dropped(where, variant):
                parts.append(f"{where} ({variant.topology.platform} x {variant.topology.count})")
            else:
                kept.append(variant)
        signature = msgspec.structs.replace(signature, variants=tuple(kept))
        if portable and signature.portable is not None:
            parts.append(f"{name}/{i} StableHLO")
            absent = m.Absent(code="NOT_SAVED", detail="pruned")
            signature = msgspec.structs.replace(signature, portable=None, portable_absent=absent)
        signatures.append(signature)
    return msgspec.structs.replace(function, signatures=tuple(signatures))


def _is_old(store: store_lib.Store, file: str) -> bool:
    return time.time() - (store.folder / file).stat().mtime > _ORPHAN_AGE_SECS

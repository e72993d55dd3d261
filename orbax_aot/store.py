"""An `_aot` folder: names, digests, compression and limits. Imports no jax."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zstandard
from etils import epath

from orbax_aot import files
from orbax_aot import manifest as m
from orbax_aot.errors import CorruptArtifactError, StepChangedError, UntrustedArtifactError

# Takes whose a file is and its path; returns why it may not be used, "" where it may.
Admit = Callable[[os.stat_result | None, str], str]

FOLDER = "_aot"
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
CONSTANTS = "constants"
ITEM = "item.json"
CODEC = "zstd"
RAW = "raw"
# Level 1 is the smallest as well as the second fastest of the low levels on PJRT payloads of the CPU: 6.5 MB raw to
# 0.63 MB in 10 ms (level 3: 0.69 MB, level -1: 0.74 MB).
_LEVEL = 1
# How much larger than stored a file may become: a few bytes cannot ask for gigabytes. Executables and StableHLO stay
# far below; a constant that does not is stored as it is.
MAX_RATIO = 256
_FREE_NBYTES = 64 << 20  # below this any ratio goes
_MAX_NAME = 100
_SAFE = re.compile(r"[^a-z0-9_-]")
_RESERVED = frozenset(
    {CONSTANTS, "con", "prn", "aux", "nul"} | {f"{n}{i}" for n in ("com", "lpt") for i in range(10)}
)

# Counted for `benchmarks/`: what a later save of unchanged functions must not do.
counters = {"compressions": 0, "decompressions": 0}
_counters_lock = threading.Lock()


def _count(name: str) -> None:
    with _counters_lock:
        counters[name] += 1


def folder_name(name: str) -> str:
    """Returns a file name for a function name: lower-case ASCII, at most 100 characters, one to one.

    Names that need no change keep theirs; the others get a digest, so that names that differ in case or in
    characters no file system likes never share a folder.
    """
    safe = _SAFE.sub("_", name.lower())[:_MAX_NAME]
    if safe == name and safe and safe not in _RESERVED and not safe.startswith("-"):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{safe.strip('-') or 'f'}.{digest}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(raw: bytes) -> tuple[bytes, dict[str, Any]]:
    """Compresses `raw`; returns the bytes to store and all the fields of `manifest.File` but its name."""
    _count("compressions")
    stored, codec = zstandard.ZstdCompressor(level=_LEVEL).compress(raw), CODEC
    if not _is_modest(len(stored), len(raw)):
        stored, codec = raw, RAW
    return stored, {
        "sha256": digest(stored),
        "raw_sha256": digest(raw),
        "nbytes": len(stored),
        "raw_nbytes": len(raw),
        "codec": codec,
    }


def _is_modest(nbytes: int, raw_nbytes: int) -> bool:
    """Whether so many stored bytes may become so many raw ones."""
    return raw_nbytes <= max(_FREE_NBYTES, MAX_RATIO * nbytes)


def cut(raw: bytes, shared: Sequence[memoryview]) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
    """Cuts out of `raw` what stands in `shared`; returns the rest, and the parts by offset in ascending order."""
    parts: list[tuple[int, bytes]] = []
    for known in sorted(shared, key=len, reverse=True):
        at = raw.find(known)
        end = at + len(known)
        if at >= 0 and all(end <= a or a + len(part) <= at for a, part in parts):
            parts.append((at, raw[at:end]))
    parts.sort(key=lambda part: part[0])
    rest, done = [], 0
    for at, part in parts:
        rest.append(raw[done:at])
        done = at + len(part)
    return b"".join((*rest, raw[done:])), tuple(parts)


def _join(rest: bytes, parts: Sequence[tuple[int, bytes]], where: str) -> bytes:
    """Puts back what `cut` cut out."""
    pieces: list[bytes] = []
    done = taken = 0  # how far the whole is put together, and how much of the rest is used
    for at, part in parts:
        if not done <= at <= done + len(rest) - taken:
            raise CorruptArtifactError(f"{where}: a cut at {at} is out of range.")
        pieces += (rest[taken : taken + at - done], part)
        taken += at - done
        done = at + len(part)
    return b"".join((*pieces, rest[taken:]))


def unpack(
    stored: bytes, file: m.File, where: str, parts: Sequence[tuple[int, bytes]] = ()
) -> bytes:
    """Returns the raw bytes of a stored file; `parts` are raw bytes that were cut out of it, by offset.

    Damaged bytes can abort the process in native code, so both digests are checked here, before anything else is
    done with them, and decompression stops at the declared size.

    Raises:
      CorruptArtifactError: the bytes are not those the manifest tells of.
    """
    if len(stored) != file.nbytes:
        raise CorruptArtifactError(
            f"{where}: expected {file.nbytes} bytes, found {len(stored)}. Save this step again."
        )
    if digest(stored) != file.sha256:
        raise CorruptArtifactError(f"{where}: the stored bytes are damaged. Save this step again.")
    expected = file.raw_nbytes - sum(len(part) for _, part in parts)
    if file.codec == RAW:
        raw = stored
    elif file.codec == CODEC:
        raw = _decompress(stored, expected, where)
    else:
        raise CorruptArtifactError(f"{where}: unknown codec {file.codec[:40]!r}.")
    if parts:
        raw = _join(raw, parts, where)
    if len(raw) != file.raw_nbytes or digest(raw) != file.raw_sha256:
        raise CorruptArtifactError(f"{where}: the raw bytes are damaged. Save this step again.")
    return raw


def _decompress(stored: bytes, raw_nbytes: int, where: str) -> bytes:
    """Returns what a single zstd frame of a known size holds; allocates no more than that size."""
    if not _is_modest(len(stored), raw_nbytes):
        raise CorruptArtifactError(
            f"{where}: {len(stored)} bytes that would become {raw_nbytes}; at most {MAX_RATIO} times as many are read."
        )
    _count("decompressions")
    try:
        found = zstandard.get_frame_parameters(stored).content_size
        if found != raw_nbytes:
            raise CorruptArtifactError(
                f"{where}: holds {found} bytes, expected {raw_nbytes}. Save this step again."
            )
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            stored, max_output_size=raw_nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as e:
        raise CorruptArtifactError(f"{where}: {e}. Save this step again.") from e


class Store:
    """The `_aot` folder of one item."""

    def __init__(self, item: epath.PathLike):
        self.item = epath.Path(item)
        self.folder = self.item / FOLDER
        self._closed = False

    @property
    def manifest_path(self) -> epath.Path:
        return self.folder / MANIFEST

    def exists(self) -> bool:
        return self.manifest_path.exists()

    def read_manifest(self) -> m.Manifest:
        """Reads and checks the manifest.

        Raises:
          CorruptArtifactError: it is damaged, larger than a manifest may be, or no plain file.
          OSError: it cannot be read.
        """
        return self.open_manifest()[0]

    def open_manifest(self) -> tuple[m.Manifest, files.Content]:
        """As `read_manifest`; also returns the bytes that were read, and whose they are."""
        content = files.read(self.folder, MANIFEST, m.MAX_MANIFEST_NBYTES)
        return m.decode(content.data, str(self.manifest_path)), content

    def write_manifest(self, body: m.Body) -> None:
        """Writes the manifest; last, so that what it names is there."""
        self.write(MANIFEST, m.encode(body))

    def replace_manifest(self, body: m.Body, before: m.Manifest | None) -> None:
        """Puts another manifest in the place of `before` (None: there was none), in a committed step.

        A reader sees the one or the other, whole: files are not changed once they are written, new ones have been
        written under new names, and this is one rename (one upload, on an object store). A signature of the old
        manifest is removed.

        Raises:
          StepChangedError: another writer was faster.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        now = self.manifest_path.read_bytes() if self.exists() else None
        if (None if now is None else m.decode(now, str(self.manifest_path))) != before:
            raise StepChangedError(
                f"{self.manifest_path}: changed by someone else meanwhile; nothing was changed. Try again."
            )
        signature = self.folder / SIGNATURE
        if signature.exists():
            from absl import (
                logging,  # not for readers: it takes a tenth of the time that inspect has
            )

            logging.warning(
                "%s: removed, since the step is not what was signed any more; sign it again.",
                signature,
            )
            signature.unlink()
        if "://" in str(self.folder):
            self.write(MANIFEST, m.encode(body))
            return
        new = self.folder / f"{MANIFEST}.{secrets.token_hex(8)}.new"
        try:
            self.write(new.name, m.encode(body))
            new.replace(self.manifest_path)
        finally:
            new.unlink(missing_ok=True)

    def write_new(self, name: str, stored: bytes) -> None:
        """Writes a file whose name has the digest of its bytes; one that is there is left alone."""
        path = self.folder / name
        if not (path.exists() and path.stat().length == len(stored)):
            self.write(name, stored)

    def list_files(self) -> dict[str, int]:
        """Returns the sizes in bytes of all files but the manifest and its signature's, by name."""
        found = {}
        folders = [self.folder]
        while folders:
            for path in folders.pop().iterdir():
                if path.is_dir():
                    folders.append(path)
                elif path.name not in (MANIFEST, SIGNATURE, ITEM) or path.parent != self.folder:
                    found[str(path.relative_to(self.folder))] = path.stat().length
        return found

    def remove(self, name: str) -> None:
        """Removes a file, and the folders that it leaves empty."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.folder or any(parent.iterdir()):
                return
            parent.rmdir()

    def write(self, name: str, stored: bytes) -> None:
        """Writes a file under the folder, making the folders it lies in.

        Raises:
          OSError: it cannot be written.
          TimeoutError: the store was closed.
        """
        if self._closed:
            raise TimeoutError(f"{self.folder / name}: too late to write it.")
        files.write(self.folder, name, stored)

    def close(self) -> None:
        """Ends writing, so that a writer that was left behind changes nothing in a step that is done."""
        self._closed = True

    def read(self, name: str, file: m.File, admit: Admit | None = None) -> bytes:
        """Returns the stored bytes of a file, not yet checked but no more than were declared.

        `admit` is asked whether a file of this owner may be used.

        Raises:
          CorruptArtifactError: it is missing, has another size, or its name leaves the folder.
          UntrustedArtifactError: `admit` gave a reason against it.
          OSError: it cannot be read.
        """
        path = self.folder / name
        try:
            content = files.read(self.folder, name, file.nbytes)
        except FileNotFoundError as e:
            raise CorruptArtifactError(f"{path}: missing. Save this step again.") from e
        if admit is not None and (why := admit(content.status, str(path))):
            raise UntrustedArtifactError(why)
        if len(content.data) != file.nbytes:
            raise CorruptArtifactError(
                f"{path}: expected {file.nbytes} bytes, found {len(content.data)}. "
                "Save this step again."
            )
        return content.data

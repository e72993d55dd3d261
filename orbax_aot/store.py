"""An `_aot` folder: names, digests, compression and limits. Imports no jax."""

from __future__ import annotations

import hashlib
import re
import os
import threading
from collections.abc import Callable
from typing import Any

import zstandard
from etils import epath

from orbax_aot import files
from orbax_aot import manifest as m
from orbax_aot.errors import CorruptArtifactError, UntrustedArtifactError

# Takes whose a file is and its path; returns why it may not be used, "" where it may.
Admit = Callable[[os.stat_result | None, str], str]

FOLDER = "_aot"
MANIFEST = "manifest.json"
CONSTANTS = "constants"
SIGNATURE = "manifest.sig"
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


def unpack(stored: bytes, file: m.File, where: str) -> bytes:
    """Returns the raw bytes of a stored file.

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
    if file.codec == RAW:
        raw = stored
    elif file.codec == CODEC:
        raw = _decompress(stored, file.raw_nbytes, where)
    else:
        raise CorruptArtifactError(f"{where}: unknown codec {file.codec[:40]!r}.")
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

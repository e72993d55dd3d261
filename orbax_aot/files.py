"""The file operations of an `_aot` folder: plain files inside it, never larger than allowed. Imports no jax.

On local file systems a file is opened first and judged after: kind, size and owner are those of what is then read,
whatever happens to its name meanwhile, and no part of the name may be a link. Object stores have neither links nor
owners; there `etils.epath` does the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import stat
from collections.abc import Iterator

from etils import epath

from orbax_aot.errors import CorruptArtifactError

MAX_NAME_PARTS = 4
_MAX_PART = 160
# Lower case only, so that no two names are one file where case does not count, and ASCII only, so that no two names
# look alike or are normalised into one another.
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_CHUNK = 16 << 20
_MAX_FILES = 1_000_000

# What others than the owner may do with a file is left to whoever copies it: group and others can only read it.
_FILE_MODE = 0o644
_FOLDER_MODE = 0o755


@dataclasses.dataclass(frozen=True)
class Content:
    """The bytes of a file, and whose it is: None where the file system does not know."""

    data: bytes
    status: os.stat_result | None


def local_path(path: epath.PathLike) -> str | None:
    """Returns a path as the operating system knows it; None for one of an object store."""
    text = os.fspath(path)
    return None if "://" in text else text


def require_name(folder: epath.Path, name: str) -> tuple[str, ...]:
    """Returns the parts of the name of a file in `folder`.

    Raises:
      CorruptArtifactError: it leaves the folder, or is none that this package writes.
    """
    parts = tuple(name.split("/"))
    if len(parts) > MAX_NAME_PARTS or not all(map(_is_plain, parts)):
        raise CorruptArtifactError(f"{folder}: {name[:200]!r} is not the name of a file in it.")
    return parts


def _is_plain(part: str) -> bool:
    return len(part) <= _MAX_PART and ".." not in part and _PART.fullmatch(part) is not None


def read(folder: epath.Path, name: str, limit: int) -> Content:
    """Reads a file of at most `limit` bytes.

    Raises:
      CorruptArtifactError: it is larger, no plain file, or reached through a link.
      OSError: it cannot be read; `FileNotFoundError` where there is none.
    """
    parts = require_name(folder, name)
    path = folder.joinpath(*parts)
    if (root := local_path(folder)) is None:
        nbytes = path.stat().length
        _require_size(path, nbytes, limit)
        return Content(path.read_bytes(), None)
    try:
        return _read_local(root, parts, path, limit)
    except OSError as e:
        # NFS: another client replaced the file between look-up and opening. A second look-up finds the new one.
        if e.errno != errno.ESTALE:
            raise
        return _read_local(root, parts, path, limit)


def _read_local(root: str, parts: tuple[str, ...], path: epath.Path, limit: int) -> Content:
    with _opened(root, parts, path) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptArtifactError(f"{path}: not a plain file.")
        _require_size(path, status.st_size, limit)
        chunks: list[bytes] = []
        left = limit + 1
        while left > 0 and (chunk := os.read(descriptor, min(left, _CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
        _require_size(path, limit + 1 - left, limit)
        return Content(b"".join(chunks), status)


def _require_size(path: epath.Path, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise CorruptArtifactError(f"{path}: {nbytes} bytes, expected at most {limit}.")


@contextlib.contextmanager
def _opened(root: str, parts: tuple[str, ...], path: epath.Path) -> Iterator[int]:
    """Opens a file part by part, following no link below and including the `_aot` folder."""
    opened: list[int] = []
    # A named pipe would block an opening reader for ever, were it not for O_NONBLOCK.
    base = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        at: int | None = None
        for i, part in enumerate((root, *parts)):
            flags = base if i == len(parts) else base | os.O_DIRECTORY
            at = os.open(part, flags, dir_fd=at)
            opened.append(at)
        yield opened[-1]
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise CorruptArtifactError(f"{path}: a link, or not a plain file ({e}).") from e
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def folder_status(folder: epath.Path) -> os.stat_result | None:
    """Returns whose a folder is; None where the file system does not know. Follows no link."""
    root = local_path(folder)
    return None if root is None else os.lstat(root)


def write(folder: epath.Path, name: str, data: bytes) -> None:
    """Writes a file, and makes the folders it lies in. Only the owner can write to them, whatever the umask.

    Raises:
      OSError: it cannot be written; what was written of it is removed, where that is possible.
    """
    parts = require_name(folder, name)
    path = folder.joinpath(*parts)
    if local_path(folder) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return
    at = os.fspath(folder)
    for part in ("", *parts[:-1]):
        at = os.path.join(at, part) if part else at
        with contextlib.suppress(FileExistsError):
            os.mkdir(at, _FOLDER_MODE)
    target = os.fspath(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(target, flags, _FILE_MODE)
    try:
        _write_all(descriptor, data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_CHUNK]) :]


def names(folder: epath.Path) -> list[str]:
    """Returns the names of all files below `folder`, sorted; links count as files and are not followed.

    Raises:
      CorruptArtifactError: there are absurdly many.
      OSError: it cannot be listed.
    """
    found: list[str] = []
    pending = [(folder, "")]
    while pending:
        at, prefix = pending.pop()
        for child in at.iterdir():
            name = prefix + child.name
            if _is_folder(child):
                pending.append((child, f"{name}/"))
            else:
                found.append(name)
            if len(found) + len(pending) > _MAX_FILES:
                raise CorruptArtifactError(f"{folder}: more than {_MAX_FILES} files.")
    return sorted(found)


def _is_folder(path: epath.Path) -> bool:
    local = local_path(path)
    if local is None:
        return path.is_dir()
    return stat.S_ISDIR(os.lstat(local).st_mode)

"""Bytes that killed the process: markers in the user's cache folder tell the next start of them. Imports no jax.

A marker is a locked file, there while an executable is loaded and while it runs for the first time. A process that dies
leaves the file and loses the lock. Whoever finds two such files under one key does not try a third time. Nothing in
here raises, and where the folder cannot be written there is no protection.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

_T = TypeVar("_T")
MAX_CRASHES = 2
_FORGOTTEN_SECS = 30 * 86400.0
_held: set[Marker] = set()


def folder() -> str:
    """Returns where markers lie: `orbax_aot/loading` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "orbax_aot", "loading")


def key_of(payload_sha256: str, *software: str) -> str:
    """Returns the key of a payload under this software: with another driver it gets another chance."""
    return hashlib.sha256("\n".join((payload_sha256, *software)).encode()).hexdigest()[:32]


class Marker:
    """One locked file; `remove` takes it away."""

    def __init__(self, path: str, descriptor: int):
        self._path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    def remove(self) -> None:
        """Removes the file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(self)
        if (
            descriptor < 0 or os.getpid() != self._pid
        ):  # a forked child ends without having run anything
            return
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def place(key: str) -> Marker | None:
    """Writes a marker; None where that is not possible."""
    try:
        import fcntl

        path = os.path.join(folder(), f"{key}-{os.getpid()}-{os.urandom(6).hex()}")
        descriptor = _create(path)
        marker = Marker(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks here: it could not be told from one that a dead process left
            marker.remove()
            return None
        _held.add(marker)
        return marker
    except (OSError, ImportError, ValueError) as e:
        logging.vlog(1, "no crash marker: %s", e)
        return None


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def find_crashes(key: str) -> str:
    """Returns why the payload under `key` should not be tried again; "" where nothing is known against it."""
    try:
        own = [os.path.join(folder(), n) for n in os.listdir(folder()) if n.startswith(key)]
        dead = [path for path in own if _is_dead(path)]
    except (OSError, ImportError, ValueError):
        return ""
    if len(dead) < MAX_CRASHES:
        return ""
    return (
        f"{len(dead)} processes ended while they loaded it or first ran it. "
        f"To try again, remove {os.path.join(folder(), key)}-*"
    )


def _is_dead(path: str) -> bool:
    """Whether a marker was left by a process that is no more. Removes what is too old to say anything."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if time.time() - os.fstat(descriptor).st_mtime > _FORGOTTEN_SECS:
            os.unlink(path)
            return False
        return os.path.exists(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def marked(key: str) -> Iterator[None]:
    """Has a marker while its block runs, whether that raises or not."""
    marker = place(key)
    try:
        yield
    finally:
        if marker is not None:
            marker.remove()


class FirstRun:
    """Has a marker while an executable runs for the first time. Later runs cost nothing."""

    def __init__(self, key: str):
        self._key: str | None = key

    @property
    def is_due(self) -> bool:
        return self._key is not None

    def watch(self, run: Callable[[], _T], wait: Callable[[_T], Any]) -> _T:
        """Returns what `run` returns; `wait` blocks until that is there, on another thread."""
        key, self._key = self._key, None
        marker = None if key is None else place(key)
        if marker is None:
            return run()
        try:
            result = run()
        except BaseException:
            marker.remove()
            raise
        # No daemon: a process that ends while one waits in native code is aborted ("exception not rethrown"). Python
        # waits for this thread instead, as the runtime's own end waits for what still runs.
        threading.Thread(
            target=_remove_after, args=(marker, wait, result), name="orbax_aot_first_run"
        ).start()
        return result


def _remove_after(marker: Marker, wait: Callable[[Any], Any], result: Any) -> None:
    try:
        wait(result)
    except Exception as e:  # an argument of the next call already, or an error that the caller sees
        logging.vlog(1, "first run: %s", e)
    finally:
        marker.remove()


@atexit.register
def _remove_all() -> None:
    """An orderly end is no crash."""
    for marker in list(_held):
        marker.remove()

"""A file system that fails: stands in for `os` in the module that does all file work of an `_aot` folder."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

READ_FAULTS = ("EIO", "EACCES", "ESTALE", "ENOENT", "short", "nothing", "slow", "renamed", "hangs")
WRITE_FAULTS = ("EIO", "ENOSPC", "EACCES", "EROFS", "ESTALE", "short", "full", "slow", "hangs")


class FaultyOs:
    """Behaves as `os` does until the `after`-th call of an operation on; then it fails in one way.

    `short` reads and writes a few bytes at a time, `nothing` ends files early, `full` writes some and then has no space
    left, `renamed` takes the folder away in between, `slow` takes its time, `hangs` more than anyone waits.
    """

    def __init__(self, fault: str, after: int, rename: Callable[[], None] = lambda: None):
        self._fault = fault
        self._left = after
        self._rename = rename
        self.hits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _is_due(self) -> bool:
        self._left -= 1
        if self._left >= 0:
            return False
        self.hits += 1
        return True

    def _fail(self) -> None:
        if self._fault == "slow":
            time.sleep(0.02)
        elif self._fault == "hangs":
            time.sleep(3600)
        elif self._fault == "renamed" and self.hits == 1:
            self._rename()
        elif self._fault.isupper():
            raise OSError(getattr(errno, self._fault), os.strerror(getattr(errno, self._fault)))

    def open(self, *args: Any, **kwargs: Any) -> int:
        if (
            self._fault in ("EACCES", "ENOENT", "ESTALE", "EROFS", "renamed", "hangs")
            and self._is_due()
        ):
            self._fail()
        return os.open(*args, **kwargs)

    def read(self, descriptor: int, nbytes: int) -> bytes:
        if self._fault == "short":
            self.hits += 1
            return os.read(descriptor, min(nbytes, 7))
        if self._fault in ("EIO", "nothing", "slow") and self._is_due():
            self._fail()
            if self._fault == "nothing":
                return b""
        return os.read(descriptor, nbytes)

    def write(self, descriptor: int, data: Any) -> int:
        if self._fault == "short":
            self.hits += 1
            return os.write(descriptor, data[:7])
        if self._fault in ("EIO", "ENOSPC", "full", "slow") and self._is_due():
            if self._fault == "full":
                if self.hits > 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return os.write(descriptor, data[: len(data) // 2 or 1])
            self._fail()
        return os.write(descriptor, data)

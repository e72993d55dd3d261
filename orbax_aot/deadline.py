"""Work that can be left behind: what hangs in it holds nobody back. Imports no jax."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(secs: float, work: Callable[[], _T], what: str) -> _T:
    """Returns what `work` returns, on a thread of its own; raises what it raises.

    Raises:
      TimeoutError: it takes longer than `secs` seconds; then it goes on, and its result is dropped.
    """
    result: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, name=f"orbax_aot_{what.split()[0]}", daemon=True).start()
    # A TimeoutError of the work's own is raised as it is; hence no `except` around `result`.
    done, _ = concurrent.futures.wait([result], timeout=secs)
    if not done:
        raise TimeoutError(f"{what}: not done within {secs:.3g} s")
    return result.result()

"""What caches may still hold of an earlier state of the code.

JAX remembers the trace of a function object that was jitted, scanned over or checkpointed, and
`functools.lru_cache` remembers results. If a value that such a function uses was changed since,
the program is still made from the old one, and the fingerprint, which sees the new one, would
lie.

So this process remembers which state a function was in before any cache knew it. A function that a
cache knows is fine as long as its state is still that one; if it was never seen before it was
cached, nothing can be said.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

_MOST_DIGESTS = 16


class _Seen:
    """What was seen of one function: fingerprints it was part of while no cache knew it."""

    def __init__(self, reference: weakref.ref[object]) -> None:
        self.reference = reference
        self.fresh_in: dict[str, None] = {}
        self.own_digest: str | None = None  # of the state in which caches know it


_lock = threading.Lock()
_seen: dict[int, _Seen] = {}


def _entry(function: object) -> _Seen:
    key = id(function)
    known = _seen.get(key)
    if known is None or known.reference() is not function:

        def forget(reference: weakref.ref[object]) -> None:
            known = _seen.get(key)
            if known is not None and known.reference is reference:
                del _seen[key]

        known = _seen[key] = _Seen(weakref.ref(function, forget))
    return known


def note_fresh(functions: Sequence[object], digest: str) -> None:
    """Notes functions that no cache knew while the fingerprint they are part of was `digest`."""
    with _lock:
        for function in functions:
            fresh_in = _entry(function).fresh_in
            fresh_in[digest] = None
            if len(fresh_in) > _MOST_DIGESTS:
                del fresh_in[next(iter(fresh_in))]


def is_unchanged(function: object, digest: str, own_digest: Callable[[], str]) -> bool:
    """Whether a function that a cache knows is in the state in which the cache met it.

    Args:
      function: the function.
      digest: the fingerprint that the function is part of now.
      own_digest: takes the fingerprint of this function alone; called only where it is needed.
    """
    with _lock:
        entry = _entry(function)
        fresh = digest in entry.fresh_in
        known = entry.own_digest
    if fresh:
        if known is None:
            entry.own_digest = own_digest()
        return True
    return known is not None and known == own_digest()

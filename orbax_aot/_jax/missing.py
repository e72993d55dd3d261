"""Telling that JAX lacks something private that this package uses, as a JAX newer than those it knows may.

Uses nothing private itself.
"""

from __future__ import annotations

_KINDS = (AttributeError, ImportError, TypeError)


def is_missing(error: BaseException) -> bool:
    """Whether an error was raised at the private door itself: a name is gone, or arguments have changed."""
    if not isinstance(error, _KINDS) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    return str(innermost.tb_frame.f_globals.get("__name__", "")).startswith("orbax_aot._jax")

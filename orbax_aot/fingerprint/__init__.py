"""Is this still the same Python code that was compiled? Answered without tracing it.

A fingerprint is a digest of what decides what a function traces to: its code and that of the
functions it reaches in the user's modules, the values they use, and the builds of the libraries
that they call. Two equal digests mean the same program as long as nothing was `undecidable`: what
this package cannot see it must not call the same. JAX's settings, the trace context and the
devices are no part of it; they are compared by value elsewhere.

The table of what is covered, and of the known holes, is in `docs/fingerprint.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

from orbax_aot.fingerprint import arguments, environment, libraries, memory, patches, values
from orbax_aot.fingerprint.walk import Walk

__all__ = ["Fingerprint", "fingerprint_call", "fingerprint_function", "invalidate_library_cache"]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The digest of a function's code, and why it may not be the whole truth.

    Attributes:
      digest: hexadecimal SHA-256 of everything seen.
      undecidable: why an equal digest would not mean the same program, each like
        `"reads os.environ [my_module.helper]"`; empty where it does.
    """

    digest: str
    undecidable: tuple[str, ...]


def fingerprint_function(
    fun: object, jit_options: Mapping[str, object] | None = None
) -> Fingerprint:
    """The fingerprint of a function whose arguments are not known.

    Args:
      fun: what was given to `jax.jit`: a function, partial, bound method or callable object.
      jit_options: the keyword arguments of `jax.jit`.

    Returns:
      The fingerprint. It takes milliseconds, runs on any thread and never raises.
    """
    return _fingerprint(fun, None, None, jit_options)


def fingerprint_call(
    fun: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    jit_options: Mapping[str, object] | None = None,
) -> Fingerprint:
    """The fingerprint of a function together with what its arguments carry statically.

    Arrays (`jax.Array`, `numpy.ndarray`, `jax.ShapeDtypeStruct`) and dynamic Python scalars
    contribute nothing but their place in the tree. Static arguments and the static data of tree
    nodes (such as a `TrainState`'s `tx`, or an nnx graph definition) are walked.

    Args:
      fun: as for `fingerprint_function`.
      args: the positional arguments.
      kwargs: the keyword arguments.
      jit_options: the keyword arguments of `jax.jit`.

    Returns:
      The fingerprint. It takes milliseconds, runs on any thread and never raises.
    """
    return _fingerprint(fun, args, kwargs, jit_options)


def invalidate_library_cache() -> None:
    """Forgets what was read of installed libraries, as after replacing one; for tests."""
    libraries.forget()
    patches.forget()


def _fingerprint(
    fun: object,
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    jit_options: Mapping[str, object] | None,
) -> Fingerprint:
    walk = Walk(values.write_value)
    try:
        environment.write_environment(walk)
        _write_patches(walk)
        walk.write("function")
        walk.visit(fun)
        walk.write("options")
        walk.visit(dict(sorted((jit_options or {}).items())))
        if args is not None:
            arguments.write_arguments(walk, fun, args, kwargs or {}, jit_options or {})
        walk.run(patches.names_looked_up)
        digest = walk.digest()
        return Fingerprint(digest, (*walk.reasons(), *_find_stale(walk, digest)))
    except Exception as error:  # a fingerprint that fails means tracing, not a lost restore
        reason = f"{type(error).__name__}: {error}"[:200]
        digest = hashlib.sha256(reason.encode()).hexdigest()
        return Fingerprint(digest, (*walk.reasons(), reason))
    finally:
        walk.let_go()


def _find_stale(walk: Walk, digest: str) -> list[str]:
    """Functions of which caches may hold an earlier state than the one that was walked."""
    if walk.reasons():
        return []  # undecidable anyway; its digest says nothing about what was fresh
    memory.note_fresh(walk.uncached, digest)
    return [
        what
        for function, what in walk.cached
        if not memory.is_unchanged(function, digest, lambda f=function: _own_digest(f))
    ]


def _own_digest(function: object) -> str:
    walk = Walk(values.write_value)
    walk.visit(function)
    walk.run(patches.names_looked_up)
    return walk.digest()


def _write_patches(walk: Walk) -> None:
    """What was put in place of parts of libraries; library code is not walked and would hide it."""
    found, unchecked = patches.find_patches()
    for path, value in found:
        walk.write("patched", path)
        walk.visit(value)
    if unchecked:
        walk.undecidable(f"nothing to compare {unchecked[0]} with: Python keeps no compiled file")

"""What every fingerprint begins with: interpreter, library builds, Flax's settings."""

from __future__ import annotations

import sys

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import libraries
from orbax_aot.fingerprint.walk import Walk

# Raise this when the same code gets another digest from a new release of this package.
_SCHEME = "1"


def write_environment(walk: Walk) -> None:
    """Writes what any function depends on, besides JAX's settings, which are compared by value."""
    walk.write("fingerprint", _SCHEME, sys.version, sys.implementation.name)
    walk.write(str(sys.flags.optimize))  # whether assert statements run
    lines, problems = libraries.describe_builds()
    walk.write("builds", *lines)
    for problem in problems:
        walk.undecidable(problem)
    try:
        for name, value in hooks.flax_state():
            walk.write("flax", name)
            walk.visit(value)
    except hooks.HookMissingError as error:
        walk.undecidable(str(error))

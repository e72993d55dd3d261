"""What arguments carry into a program besides shapes and dtypes: tree structure and static data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from orbax_aot._jax import hooks
from orbax_aot.fingerprint import jax_values
from orbax_aot.fingerprint.walk import Walk

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_DYNAMIC_SCALARS = (bool, int, float, complex)


def write_arguments(
    walk: Walk,
    fun: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Mapping[str, object],
) -> None:
    """Writes the static arguments, and of the others their structure and its static data."""
    numbers, names = _static_parameters(fun, options, len(args))
    for index, argument in enumerate(args):
        walk.write("argument", str(index))
        _write_argument(walk, argument, static=index in numbers)
    for name, argument in sorted(kwargs.items()):
        walk.write("argument", name)
        _write_argument(walk, argument, static=name in names)


def _write_argument(walk: Walk, argument: object, *, static: bool) -> None:
    if static:
        walk.write("static")
        walk.visit(argument)
        return
    leaves, tree = jax.tree_util.tree_flatten(argument)
    jax_values.write_tree_definition(walk, tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.core.Tracer):
            walk.undecidable("an argument of a trace that is under way")
        elif not isinstance(leaf, _ARRAYS) and type(leaf) not in _DYNAMIC_SCALARS:
            walk.write("leaf", str(index))
            walk.visit(leaf)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def _static_parameters(
    fun: Any, options: Mapping[str, object], count: int
) -> tuple[set[int], set[str]]:
    """Positions and names of static parameters; as jit does, one is inferred from the other."""
    numbers = _as_tuple(options.get("static_argnums"))
    names = _as_tuple(options.get("static_argnames"))
    if hooks.is_jitted(fun):
        own = dict(hooks.jit_options(fun))
        numbers += _as_tuple(own.get("static_argnums"))
        names += _as_tuple(own.get("static_argnames"))
    positions = {number if number >= 0 else number + count for number in numbers}
    if not (numbers or names):
        return set(), set()
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return positions, set(names)
    positional = [p.name for p in parameters
                  if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    found = set(names) | {positional[i] for i in positions if i < len(positional)}
    return positions | {i for i, name in enumerate(positional) if name in found}, found

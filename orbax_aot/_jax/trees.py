"""The pytree registry and the leaves' paths."""

from __future__ import annotations

from typing import Any

import jax


def flatten_node(value: Any) -> tuple[list[Any], Any] | None:
    """Returns children and auxiliary data of a registered custom node; None for another kind of object.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import tree_util

    entry = tree_util._registry.get(type(value))
    if entry is None:
        return None
    children, aux = entry.to_iter(value)
    return list(children), aux


def find_node_type(name: str) -> type | None:
    """Returns the registered pytree type that is called `module:qualname`; None where there is none.

    Nothing is imported. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import tree_util

    for node_type in list(tree_util._registry):
        if f"{node_type.__module__}:{node_type.__qualname__}" == name:
            return node_type
    return None


def unflatten_node(node_type: type, aux: Any, children: list[Any]) -> Any:
    """Makes a node of a registered type. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""
    from jax._src import tree_util

    return tree_util._registry[node_type].from_iter(aux, tuple(children))


def parse_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
) -> tuple[Any, list[Any]]:
    """Returns jit's own hashable signature of a call (trees and static arguments) and the flat dynamic arguments.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import tree_util
    from jax._src.lib import jax_jit

    return jax_jit.parse_arguments(
        args,
        tuple(kwargs.values()),
        tuple(kwargs.keys()),
        static_argnums,
        static_argnames,
        tree_util.tracing_registry,
    )


def key_name(key: Any) -> str:
    """Returns one key of a key path as `keystr(simple=True)` writes it."""
    return jax.tree_util.keystr((key,), simple=True)

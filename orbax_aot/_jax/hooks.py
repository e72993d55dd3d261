"""The private parts of JAX and Flax that a fingerprint has to look at.

A hook that a JAX version does not offer raises `HookMissingError`; the fingerprint then says that
it cannot decide, instead of judging on half of the facts.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any


class HookMissingError(Exception):
    """This JAX or Flax version does not offer what a fingerprint needs."""


_SOURCE_FIELDS = frozenset({"fun_sourceinfo", "fun_signature"})


def is_jitted(value: object) -> bool:
    """Whether `value` is what `jax.jit` returns. Seen on JAX 0.10.2, 0.11.2 and 0.12.0.1."""
    return type(value).__name__ == "PjitFunction" and type(value).__module__.startswith("jax")


def is_jit_information(value: object) -> bool:
    """Whether `value` is what a jitted function keeps its options in. Seen as `is_jitted`."""
    return type(value).__name__ == "PjitInfo" and type(value).__module__.startswith("jax")


def is_debug_information(value: object) -> bool:
    """Whether `value` only says where a function comes from. Seen as `is_jitted`."""
    return type(value).__name__ == "DebugInfo" and type(value).__module__.startswith("jax")


def jit_options(jitted: Any) -> list[tuple[str, Any]]:
    """The options a function was jitted with, without what says where its source is.

    Takes the jitted function or its information. Seen on JAX 0.10.2, 0.11.2 and 0.12.0.1
    (`_jit_info`, a named tuple).
    """
    info = jitted if is_jit_information(jitted) else getattr(jitted, "_jit_info", None)
    fields = getattr(info, "_fields", None)
    if not fields:
        raise HookMissingError("a jitted function has no _jit_info fields")
    return [(name, getattr(info, name)) for name in fields if name not in _SOURCE_FIELDS]


def is_cached_function(value: object) -> bool:
    """Whether `value` is a function behind `jax.util`'s cache. Seen on JAX 0.11.2 and 0.12.0.1."""
    cls = type(value)
    return cls.__name__ in ("StrongLRUCache", "WeakrefLRUCache") and cls.__module__.startswith(
        "jax"
    )


def pytree_functions(cls: type) -> tuple[Callable[..., Any], ...] | None:
    """How `cls` is flattened and built again, or None where it is no registered pytree node.

    Seen on JAX 0.10.2, 0.11.2 and 0.12.0.1 (`tree_util._registry`).
    """
    from jax._src import tree_util

    registry = getattr(tree_util, "_registry", None)
    if not isinstance(registry, dict):
        raise HookMissingError("jax has no Python pytree registry")
    entry = registry.get(cls)
    if entry is None:
        return None
    functions = (getattr(entry, "to_iter", None), getattr(entry, "from_iter", None))
    if not all(callable(function) for function in functions):
        raise HookMissingError("a pytree registration has no to_iter and from_iter")
    return functions  # type: ignore[return-value]


def flax_state() -> Iterator[tuple[str, Any]]:
    """Flax's own settings that change what a model traces to, of this thread, where Flax is loaded.

    Seen on flax 0.12.8 and 0.12.12: the configuration, logical axis rules, method interceptors.
    """
    if "flax" not in sys.modules:
        return
    config = sys.modules.get("flax.configurations")
    values = getattr(getattr(config, "config", None), "_values", None)
    if not isinstance(values, dict):
        raise HookMissingError("flax's configuration has no _values")
    yield "config", dict(sorted(values.items()))
    spmd = sys.modules.get("flax.core.spmd")
    if spmd is not None:
        rules = getattr(spmd, "_axis_rules", None)
        if not hasattr(rules, "rules"):
            raise HookMissingError("flax has no _axis_rules")
        yield "axis_rules", rules.rules  # pyright: ignore[reportOptionalMemberAccess]
    linen = sys.modules.get("flax.linen.module")
    if linen is not None:
        stack = getattr(linen, "_global_interceptor_stack", None)
        if stack is None:
            raise HookMissingError("flax has no _global_interceptor_stack")
        yield "interceptors", list(stack)


@functools.cache
def _trace_cache_callbacks() -> tuple[object, ...]:
    """What JAX's trace caches leave on the functions that they remember.

    The caches hold weak references to functions, each cache with one callback for all of its own.
    A throwaway function that is traced shows which callbacks these are. Seen on JAX 0.10.2,
    0.11.2 and 0.12.0.1. (Listing the keys of the caches ends the process on some of these.)
    """
    import jax

    def probe() -> tuple[()]:
        return ()

    jax.eval_shape(probe)
    callbacks = [reference.__callback__ for reference in weakref.getweakrefs(probe)]
    if not any(callback is not None for callback in callbacks):
        raise HookMissingError("JAX's trace caches leave nothing on a traced function")
    return tuple(callback for callback in callbacks if callback is not None)


def was_traced(function: object) -> bool:
    """Whether JAX may remember a trace of this very object, and so not look at its code again."""
    references = weakref.getweakrefs(function)
    if not references:
        return False
    callbacks = _trace_cache_callbacks()
    return any(
        reference.__callback__ is callback for reference in references for callback in callbacks
    )


_RULE_MODULES = ("ad", "batching", "mlir", "partial_eval")


def rule_tables() -> list[tuple[str, dict[Any, Any]]]:
    """JAX's tables of rules by primitive: differentiation, batching, partial evaluation, lowering.

    Seen on JAX 0.10.2, 0.11.2 and 0.12.0.1 as dictionaries in `jax._src.interpreters`; those of
    lowering by platform are dictionaries of such.
    """
    from jax._src import core

    tables = []
    for module_name in _RULE_MODULES:
        module = importlib.import_module(f"jax._src.interpreters.{module_name}")
        for name, value in vars(module).items():
            if not isinstance(value, dict):
                continue
            nested = {f"{name}.{key}": table for key, table in value.items()
                      if isinstance(key, str) and isinstance(table, dict)}  # fmt: skip
            for path, table in (nested or {name: value}).items():
                if any(isinstance(key, core.Primitive) for key in table):
                    tables.append((f"{module_name}.{path}", table))
    if not any(name == "mlir._lowerings" for name, _ in tables):
        raise HookMissingError("JAX has no table of lowering rules")
    return sorted(tables, key=lambda item: item[0])


def functions_of_rule(entry: Any) -> tuple[Any, ...]:
    """The functions of one entry of `rule_tables`."""
    if isinstance(entry, tuple):
        return entry
    return (getattr(entry, "rule", entry),)


def primitives_of_jax() -> frozenset[int]:
    """The identities of the primitives that JAX itself has made. Seen as `rule_tables`."""
    from jax._src import core

    return frozenset(
        id(value)
        for name, module in list(sys.modules.items())
        if name.startswith("jax.") and module is not None
        for value in list(vars(module).values())
        if isinstance(value, core.Primitive)
    )

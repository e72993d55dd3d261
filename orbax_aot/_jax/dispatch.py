"""jit's C++ dispatch over executables of our own, at jit's cost for each call.

The C++ function asks a Python function at a miss; what that returns as fast-path data is called without Python from
then on. Its cache key covers trees, shapes, dtypes, weak types, shardings, static arguments and the trace context.
Seen on jax 0.10.2, 0.11.2 and 0.12.0.1, each function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from orbax_aot._jax import compiled as compiled_lib


def make_dispatcher(
    name: str,
    fun: Callable[..., Any],
    miss: Callable[..., tuple[Any, Any, bool]],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Any:
    """Returns a C++ callable that asks `miss(*args, **kwargs)` for what it has not seen.

    `miss` returns the result, fast-path data or None, and whether to forget the entry. Under `jax_debug_nans`, `fun`
    is called operation by operation where a result of the fast path is not finite.
    """
    from jax._src import tree_util
    from jax._src.interpreters import pxla
    from jax._src.lib import _jax

    dispatcher = _jax.pjit(
        name,
        fun,
        miss,
        list(static_argnums),
        list(static_argnames),
        pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
    )
    dispatcher._fun = fun  # where JAX's own hook for `jax_debug_nans` looks
    return dispatcher


def clear(dispatcher: Any) -> None:
    """Forgets all that a dispatcher has seen."""
    dispatcher._clear_cache()


def call_flat(compiled: jax.stages.Compiled, args: Sequence[Any]) -> list[Any]:
    """Runs a compiled function on flat arguments; returns flat results. Checks types and shardings, as JAX does.

    JAX's check knows no tokens; with tokens among them, the arguments are those that the signature was matched with.
    """
    from jax._src import core

    executable: Any = compiled._executable
    has_tokens = any(isinstance(arg, core.Token) for arg in args)
    run = executable.unsafe_call if has_tokens else executable.call
    return run(*compiled_lib.constants_of(compiled), *args)


def make_fastpath(
    compiled: jax.stages.Compiled, out_tree: Any, outputs: Sequence[Any], n_args: int
) -> Any | None:
    """Returns the fast-path data of an executable that has just run; None where C++ cannot call it.

    That is the case with effects, host callbacks, refs and results that are no plain arrays.
    """
    from jax._src import config, core, dtypes, sharding_impls
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client as xc

    executable = compiled._executable
    if not isinstance(executable, pxla.MeshExecutable):
        return None
    run = executable.unsafe_call
    if (
        not isinstance(run, pxla.ExecuteReplicated)
        or run.ordered_effects
        or run.has_unordered_effects
        or run.has_host_callbacks
        or executable._mut
        or config.no_execution.value
    ):
        return None
    flat, dispatch_tree = pxla.reflatten_outputs_for_dispatch(out_tree, outputs)
    if not all(isinstance(x, xc.ArrayImpl) for x in flat):
        return None

    def physical(avals: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        return [
            sharding_impls.physical_sharding(a, s)
            if a is not core.abstract_token and dtypes.issubdtype(a.dtype, dtypes.extended)
            else s
            for s, a in zip(shardings, avals, strict=False)
        ]

    constants = executable.shard_const_args(compiled_lib.constants_of(compiled))
    kept = executable._kept_var_idx
    return pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        dispatch_tree,
        physical(executable.in_avals, executable._in_shardings),
        physical(executable.out_avals, executable._out_shardings),
        [x.aval for x in flat],
        [x._committed for x in flat],
        [i in kept for i in range(len(constants) + n_args)],
        executable._dispatch_in_layouts,
        constants,
    )


def static_arguments_of(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the static positions and names of a jitted function, resolved against each other."""
    info = jitted._jit_info
    return tuple(info.static_argnums), tuple(info.static_argnames)


def options_of(jitted: Any) -> dict[str, Any]:
    """Returns all that a jitted function was given besides the function, by jit's own names."""
    info = jitted._jit_info
    return {
        name: value
        for name, value in info._asdict().items()
        if name not in ("fun_sourceinfo", "fun_signature")
    }


def compiler_options_of(jitted: Any) -> dict[str, str]:
    """Returns the `compiler_options` of a jitted function as text; of long ones (profiles) the digest."""
    return {str(k): _describe_option(v) for k, v in jitted._jit_info.compiler_options_kvs}


def _describe_option(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    if isinstance(value, bytes) or len(raw) > 200:
        return f"{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}"
    return str(value)


def is_jitted(value: Any) -> bool:
    """Whether `value` is what `jax.jit` returns."""
    from jax._src.lib import _jax

    return isinstance(value, _jax.PjitFunction) and hasattr(value, "_jit_info")


def wrapped_function(jitted: Any) -> Any:
    return jitted._fun


def is_floating_point_error(error: BaseException) -> bool:
    """Whether an error is the internal one that `jax_debug_nans` raises inside an executable."""
    from jax._src import api_util

    return isinstance(error, api_util.InternalFloatingPointError)


def explain_floating_point_error(
    error: Exception, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Runs `fun` operation by operation, as jit does, to raise at the operation that made a NaN."""
    from jax._src import api_util

    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)


def is_committed(array: Any) -> bool:
    return bool(getattr(array, "_committed", False))


def default_device() -> Any:
    """Returns the device of arguments that are on none."""
    from jax._src import config

    value = config.default_device.value
    if value is None or isinstance(value, str):
        return jax.local_devices(backend=value)[0]
    return value


def jit_again(fun: Any, jitted: Any) -> Any:
    """Returns `fun` jitted with all that `jitted` was given. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""
    from jax._src import pjit

    return pjit._cpp_pjit(fun, jitted._jit_info)

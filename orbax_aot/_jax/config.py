"""JAX's configuration and trace context, as plain data."""

from __future__ import annotations

import enum
from typing import Any

# Set per call site or per thread for reasons that do not change the program, or compared in another way.
_NOT_COMPARED = frozenset(
    {"axis_env_state", "jax_default_device", "jax_disable_jit", "jax_no_execution"}
)
# Read by JAX when it makes compile options, though not part of its trace context.
_COMPILE_CONFIG = (
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
    "jax_compiler_enable_remat_pass",
)


def trace_context() -> dict[str, Any]:
    """Returns what of the calling thread's context a trace depends on, by name; what is unset or false is left out.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import config

    names = config.config_ext.trace_context_names()
    values = config.trace_context()
    if len(names) != len(values):
        raise RuntimeError("jax names another number of trace context values than it has")
    return _describe(dict(zip(names, values, strict=True)))


def raw_trace_context() -> tuple[Any, ...]:
    """Returns JAX's own hashable trace context of this thread. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1."""
    from jax._src import config

    return config.trace_context()


def global_config() -> dict[str, Any]:
    """Returns the process-wide settings that a compiled program depends on, by name.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import config

    states = config.config_states
    names = [n for n in config.config_ext.trace_context_names() if n in states]
    values = {name: states[name].get_global() for name in names}
    for name in _COMPILE_CONFIG:
        if name in states:
            values[name] = states[name].get_global()
        elif name in config.config.values:
            values[name] = config.config.values[name]
    return _describe(values)


def _describe(values: dict[str, Any]) -> dict[str, Any]:
    described = {}
    for name, value in values.items():
        if name not in _NOT_COMPARED and (plain := _plain(value)):
            described[name] = plain
    return described


def _plain(value: Any) -> Any:
    """Returns JSON data that is equal where `value` means the same; falsy where it says nothing."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [plain for item in value if (plain := _plain(item))]
    if hasattr(value, "axis_names") and hasattr(value, "axis_types"):  # Mesh or AbstractMesh
        sizes = getattr(value, "axis_sizes", ())
        axes = [[str(n), int(s)] for n, s in zip(value.axis_names, sizes, strict=True)]
        types = [t.name for t in value.axis_types or ()]
        return {"axes": axes, "types": types} if axes else None
    return f"{type(value).__module__}.{type(value).__qualname__}: {value!r}"


def tracing_is_forced() -> bool:
    """Whether settings are on under which only `jax.jit` itself does the right thing.

    Profile-guided recompilation replaces executables behind the caller's back, and with jit disabled nothing is
    compiled at all. Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    from jax._src import config

    return bool(
        config.disable_jit.value
        or config.enable_pgle.value
        or config.no_tracing.value
        or config.debug_key_reuse.value
        or config.check_tracer_leaks.value
    )


def device_settings() -> dict[str, Any]:
    """Returns the settings that say which devices a process has. Seen on JAX 0.10.2, 0.11.2 and 0.12.0.1."""
    import jax

    names = ("jax_platforms", "jax_num_cpu_devices")
    found = {name: getattr(jax.config, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, "", -1)}

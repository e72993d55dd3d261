"""Options of jit and of the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from support_case import Program, Section, array, call

import orbax_aot as oaot

section = Section("Compile options")


def _add(title: str, options: dict) -> None:
    section.case(title)(
        lambda devices: call(
            lambda x: jnp.tanh(x @ x), array(8, 8), jit={"compiler_options": options}
        )
    )


_add("compiler_options: a boolean", {"xla_cpu_enable_fast_math": True})
_add("compiler_options: a number", {"xla_backend_optimization_level": 1})
_add("compiler_options: a string", {"xla_cpu_prefer_vector_width": "256"})


@section.case("an FDO profile given as bytes")
def _(devices):
    return call(
        lambda x: jnp.tanh(x @ x),
        array(8, 8),
        jit={"compiler_options": {"fdo_profile": b"\x00" * 1000}},
    )


@section.case("jit's inline and named options")
def _(devices):
    return call(lambda x: x * 2, array(8), jit={"inline": True, "keep_unused": True})


@section.case("default_matmul_precision")
def _(devices):
    return call(
        lambda x: x @ x, array(8, 8), context=lambda: jax.default_matmul_precision("float32")
    )


@section.case("jax_numpy_dtype_promotion strict")
def _(devices):
    return call(lambda x: x + x, array(8), context=lambda: jax.numpy_dtype_promotion("strict"))


@section.case("jax_threefry_partitionable off")
def _(devices):
    def f(key):
        return jax.random.normal(key, (8,))

    import numpy as np

    return call(f, np.array([0, 1], np.uint32), context=lambda: jax.threefry_partitionable(False))


@section.case("jax.stages.Compiled, given as it is", remap=False)
def _(devices):
    jitted = jax.jit(lambda x: x * 2 + 1)
    return Program({"f": oaot.compile(jitted, array(8))}, lambda fns: fns["f"](array(8)))

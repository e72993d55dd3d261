"""Constants that a program closes over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support_case import Program, Section, array, call, put

import orbax_aot as oaot

section = Section("Constants")


def simplified(on: bool):
    """JAX's mode in which constants become hidden arguments of the program."""

    def context():
        from jax._src import config

        return config.use_simplified_jaxpr_constants(on)

    return context


@section.case("a small constant")
def _(devices):
    table = array(8)
    return call(lambda x: x + table, array(8, seed=1))


@section.case("a jax array as constant")
def _(devices):
    table = jax.device_put(array(8, 8))
    return call(lambda x: x @ table, array(8, seed=1))


@section.case("a constant of 4 MB")
def _(devices):
    table = np.arange(1 << 20, dtype=np.float32)
    return call(lambda x: table * x, np.float32(3))


for _on in (True, False):

    @section.case(f"jax_use_simplified_jaxpr_constants {'on' if _on else 'off'}")
    def _(devices, on=_on):
        table = jax.device_put(array(8, 8))
        return call(lambda x: (x @ table, jnp.sum(table)), array(8, seed=1), context=simplified(on))


@section.case("constant arguments with unused arguments and donation")
def _(devices):
    table, other = jax.device_put(array(8)), jax.device_put(array(8, seed=2))
    x = jax.device_put(array(8, seed=1))

    def run(fns):
        return fns["f"](array(3), x), x.is_deleted()

    f = oaot.jit(lambda u, x: x * table + other, donate_argnums=1)
    return Program({"f": f}, run, simplified(True))


@section.case("constant arguments over a mesh", devices=4)
def _(devices):
    mesh = Mesh(np.array(devices), ("a",))
    table = put(array(8), NamedSharding(mesh, P("a")))
    x = put(array(8, seed=1), NamedSharding(mesh, P("a")))
    return call(lambda x: x * table, x, context=simplified(True))


@section.case("constant arguments that are PRNG keys")
def _(devices):
    key = jax.random.wrap_key_data(np.array([1, 2], np.uint32))
    return call(lambda x: x + jax.random.uniform(key, (4,)), array(4), context=simplified(True))


@section.case("a constant that two functions share")
def _(devices):
    table = jax.device_put(array(64, 64))
    fns = {
        "left": oaot.jit(lambda x: x @ table),
        "right": oaot.jit(lambda x: table @ x),
    }
    return Program(
        fns, lambda fns: [fns["left"](array(64)), fns["right"](array(64))], simplified(True)
    )

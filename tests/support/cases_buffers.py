"""Donated, aliased and mutable buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support_case import Program, Section, Unavailable, array, call, not_carried, put

import orbax_aot as oaot

section = Section("Buffers")


def _new_ref(value):
    """Returns a ref, having read one like it: some versions of JAX compile something for that."""
    if not hasattr(jax, "new_ref"):
        raise Unavailable("no jax.new_ref")
    jax.freeze(jax.new_ref(value))
    return jax.new_ref(value)


def _pointer(x: jax.Array) -> int:
    return x.addressable_shards[0].data.unsafe_buffer_pointer()


@section.case("donation of one argument; the buffer is really reused")
def _(devices):
    x = jax.device_put(array(1024))

    def run(fns):
        # The first buffer may lie in numpy's memory, which is never reused; the second is XLA's own.
        y = fns["f"](x)
        before = _pointer(y)
        z = fns["f"](y)
        return z, x.is_deleted(), y.is_deleted(), _pointer(z) == before

    return Program({"f": oaot.jit(lambda x: x + 1, donate_argnums=0)}, run)


@section.case("donation of one leaf by name, the other stays")
def _(devices):
    x, y = jax.device_put(array(64)), jax.device_put(array(64, seed=1))

    def run(fns):
        z = fns["f"](x, y=y)
        return z, x.is_deleted(), y.is_deleted()

    return Program({"f": oaot.jit(lambda x, y: x + y, donate_argnames="y")}, run)


@section.case("donation of a whole TrainState over a mesh", devices=4)
def _(devices):
    import optax
    from flax.training.train_state import TrainState

    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    params = {"w": array(8, 8), "b": array(8)}
    tx = optax.adam(1e-2)
    moments = jax.tree.map(np.asarray, tx.init(params))
    state = TrainState(np.int32(0), None, params, tx, moments)
    state = jax.tree.map(
        lambda x: put(x, NamedSharding(mesh, P("data", "model") if np.ndim(x) == 2 else P())), state
    )

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    x = put(array(16, 8), NamedSharding(mesh, P("data")))

    def run(fns):
        first = fns["f"](state, x)
        kept = _pointer(first.params["w"])
        second = fns["f"](first, x)
        return (
            second,
            [leaf.is_deleted() for leaf in jax.tree.leaves((state, first))],
            _pointer(second.params["w"]) == kept,
        )

    return Program({"f": oaot.jit(step, donate_argnums=0)}, run)


@section.case("donation that no result can use")
def _(devices):
    import warnings

    x = jax.device_put(array(64))

    def run(fns):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fns["f"](x)

    return Program({"f": oaot.jit(lambda x: jnp.sum(x), donate_argnums=0)}, run)


@section.case("keeping arguments that are donated and unused")
def _(devices):
    x, y = jax.device_put(array(64)), jax.device_put(array(8))

    def run(fns):
        return fns["f"](x, y), x.is_deleted()

    return Program({"f": oaot.jit(lambda x, y: y + 1, donate_argnums=0)}, run)


@section.case("refs as arguments, updated in place")
def _(devices):
    ref = _new_ref(jax.device_put(array(8)))

    def f(ref, x):
        ref[...] = ref[...] * 2 + x
        return x - 1

    def run(fns):
        y = fns["f"](ref, array(8, seed=1))
        z = fns["f"](ref, array(8, seed=2))
        return y, z, jax.freeze(ref)

    return Program({"f": oaot.jit(f)}, run)


@section.case("several refs, of which one is only read")
def _(devices):
    refs = {name: _new_ref(jax.device_put(array(8, seed=i))) for i, name in enumerate("abc")}

    def f(refs):
        refs["a"][...] += refs["b"][...]
        refs["c"][0] = 7.0
        return jnp.sum(refs["a"][...])

    def run(fns):
        return fns["f"](refs), {name: jax.freeze(ref) for name, ref in refs.items()}

    return Program({"f": oaot.jit(f)}, run)


@section.case("refs over a mesh", devices=4)
def _(devices):
    mesh = Mesh(np.array(devices), ("x",))
    ref = _new_ref(put(array(8), NamedSharding(mesh, P("x"))))

    def f(ref):
        ref[...] = ref[...] + 1

    def run(fns):
        fns["f"](ref)
        return jax.freeze(ref)

    return Program({"f": oaot.jit(f)}, run)


@section.case("refs made and freed inside")
def _(devices):
    def f(x):
        ref = jax.new_ref(x)
        ref[...] *= 2
        return jax.freeze(ref)

    return call(f, array(8))


@section.case("closed-over refs", expected=not_carried("NOT_SERIALIZABLE"))
def _(devices):
    ref = _new_ref(jax.device_put(array(8)))

    def f(x):
        ref[...] += x
        return x * 2

    def run(fns):
        y = fns["f"](array(8, seed=1))
        return y, np.asarray(ref[...])

    return Program({"f": oaot.jit(f)}, run)


@section.case("buffers of the arguments may come as numpy arrays or jax arrays")
def _(devices):
    def run(fns):
        x = array(8)
        return fns["f"](x), fns["f"](jax.device_put(x)), fns["f"](x.tolist().__len__())

    return Program({"f": oaot.jit(lambda x: x * 2)}, run)

"""Types and trees of arguments and results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax._src.random import prng  # user-defined PRNGs have no public door
from support_case import (
    Program,
    Section,
    Unavailable,
    array,
    call,
    not_carried,
)

section = Section("Arguments and results")

_DTYPES = (
    *(
        "bool",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "uint2",
        "uint4",
        "uint8",
        "uint16",
        "uint32",
    ),
    *("bfloat16", "float16", "float32", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "complex64"),
)


def _add_dtype(name: str) -> None:
    @section.case(f"dtype {name}")
    def make(devices):
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)

        def f(x):
            wide = x if name == "complex64" else x.astype(jnp.float32)
            return x, (wide * 2 + 1).astype(dtype), jnp.sum(wide)

        return call(f, np.abs(array(4, 8)).astype(dtype))


for _name in _DTYPES:
    _add_dtype(_name)


@section.case("64-bit dtypes under jax_enable_x64")
def _(devices):
    def f(x, y, z):
        return x * 3, y / 3, z * 1j, jnp.sum(y)

    def context():
        return jax.enable_x64(True)

    return call(
        f,
        array(8, dtype=np.int64),
        array(8, dtype=np.float64),
        array(8, dtype=np.complex128),
        context=context,
    )


@section.case("float0 as a result of differentiation")
def _(devices):
    return call(jax.grad(lambda x, n: jnp.sum(x) * n, argnums=1, allow_int=True), array(4), 3)


def _add_key(implementation: str) -> None:
    @section.case(f"PRNG keys of {implementation}")
    def make(devices):
        if implementation not in prng.prngs:
            raise Unavailable(f"this JAX has no PRNG {implementation}")
        key = jax.random.wrap_key_data(
            np.arange(prng.prngs[implementation].key_shape[0], dtype=np.uint32), impl=implementation
        )

        def f(key):
            new, sub = jax.random.split(key)
            return new, jax.random.normal(sub, (4,))

        return call(f, key)


for _name in ("threefry2x32", "rbg", "unsafe_rbg"):
    _add_key(_name)


_counter_prng = prng.PRNGImpl(
    key_shape=(1,),
    seed=lambda seed: jnp.asarray(seed, jnp.uint32).reshape(1),
    split=lambda key, shape: (
        key[0] + jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(*shape, 1)
    ),
    random_bits=lambda key, width, shape: jnp.full(shape, key[0], getattr(jnp, f"uint{width}")),
    fold_in=lambda key, data: key + jnp.asarray(data, jnp.uint32),
    name="orbax_aot_counter",
    tag="oac",
)


@section.case("PRNG keys of an implementation of the user's, registered")
def _(devices):
    if _counter_prng.name not in prng.prngs:
        prng.register_prng(_counter_prng)
    key = jax.random.wrap_key_data(np.array([7], np.uint32), impl=_counter_prng.name)
    return call(lambda key: (jax.random.fold_in(key, 1), jax.random.bits(key, (4,))), key)


@section.case(
    "PRNG keys of an implementation of the user's, not registered",
    expected=not_carried("NOT_SERIALIZABLE"),
)
def _(devices):
    impl = (
        dataclasses.replace(_counter_prng, name="orbax_aot_unknown")
        if dataclasses.is_dataclass(_counter_prng)
        else _counter_prng._replace(name="orbax_aot_unknown")
    )
    key = prng.random_wrap(jnp.array([7], jnp.uint32), impl=impl)
    return call(lambda key: jax.random.fold_in(key, 1), key)


@section.case("raw uint32 keys")
def _(devices):
    return call(lambda key: jax.random.normal(key, (4,)), np.array([0, 7], np.uint32))


@section.case("weak types, also of Python numbers")
def _(devices):
    return call(lambda x, y, z: (x * y, x + z, z), np.float16(2).reshape(()), 3.0, 4)


@section.case("weak types of arrays")
def _(devices):
    weak = jax.device_put(np.float32(2))  # placed only; made weak below without compiling
    weak = jax.numpy.asarray(2.0)
    assert weak.weak_type
    return call(lambda x, w: (x * w, w + 1), array(4, dtype=ml_dtypes.bfloat16), weak)


@section.case("Python bool, int, float and complex")
def _(devices):
    return call(lambda b, i, f, c: (b, i + 1, f * 2, c * 1j), True, 3, 0.5, 1 + 2j)


@section.case("zero-size arrays")
def _(devices):
    return call(lambda x, y: (x * 2, jnp.sum(x), y), array(0, 4), array(3, 0, 2))


@section.case("scalars of shape ()")
def _(devices):
    return call(lambda x: (x + 1, -x), array())


@section.case("an array of rank 8")
def _(devices):
    return call(lambda x: x.T, array(1, 2, 1, 3, 1, 2, 1, 2))


@section.case("None leaves")
def _(devices):
    return call(lambda x: {"a": None, "b": x["a"] * 2, "c": [None]}, {"a": array(4), "n": None})


@section.case("no arguments")
def _(devices):
    return call(lambda: jnp.arange(4) * 2)


@section.case("no results")
def _(devices):
    return call(lambda x: (), array(4))


@section.case("neither arguments nor results")
def _(devices):
    return call(lambda: None)


@section.case("empty containers")
def _(devices):
    return call(lambda x, e: (x["a"], {}, [], e), {"a": array(4), "e": {}}, ())


@section.case("5,000 leaves")
def _(devices):
    tree = {f"leaf{i:04}": np.full((2,), i, np.float32) for i in range(5000)}
    return call(lambda t: {k: t[k] for k in t}, tree)


@section.case("nested containers: dict, list, tuple, OrderedDict, defaultdict")
def _(devices):
    import collections

    tree = {
        "o": collections.OrderedDict(b=array(2), a=array(3)),
        "d": collections.defaultdict(list, {"x": array(4)}),
        "l": [array(1), (array(2), array(3))],
    }
    return call(lambda t: {"same": t, "new": [t["o"], (t["l"][0],)]}, tree)


@section.case("an OrderedDict made inside, not in the order of its keys")
def _(devices):
    import collections

    return call(lambda x: collections.OrderedDict(b=x, c=None, a=x + 1), array(2))


@section.case("a defaultdict made inside", by_program=True)
def _(devices):
    import collections

    return call(lambda x: collections.defaultdict(list, b=x, a=x + 1), array(2))


@section.case("a dictionary with keys that are no strings")
def _(devices):
    return call(lambda x: {3: x, 1: x + 1}, array(2))


@section.case("a dictionary with keys that are tuples", by_program=True)
def _(devices):
    return call(lambda x: {("b", 1): x, ("a", 2): x + 1}, array(2))


class Point(NamedTuple):
    x: Any
    y: Any


@section.case("named tuples")
def _(devices):
    return call(lambda p: (Point(p.y, p.x), p), Point(array(2), array(3)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["name"])
@dataclasses.dataclass
class Named:
    x: Any
    y: Any
    name: str


@section.case("registered dataclasses with static fields")
def _(devices):
    return call(lambda p: Named(p.y, p.x, p.name + "!"), Named(array(2), array(3), "p"))


@jax.tree_util.register_pytree_with_keys_class
class Node:
    """A node whose auxiliary data is no JSON."""

    def __init__(self, x, tag):
        self.x, self.tag = x, tag

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("x"), self.x),), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(children[0], tag)


@section.case("pytree nodes of the user's with opaque auxiliary data", by_program=True)
def _(devices):
    return call(lambda n: (Node(n.x * 2, n.tag), n.x), Node(array(2), frozenset({"a"})))


@section.case("TrainState of flax with optax")
def _(devices):
    import flax.linen as nn
    import optax
    from flax.training.train_state import TrainState

    model = nn.Dense(3)
    params = {"params": {"kernel": array(4, 3), "bias": array(3)}}
    tx = optax.adam(1e-2)
    state = TrainState(0, model.apply, params, tx, jax.tree.map(np.asarray, tx.init(params)))

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    return call(step, state, array(8, 4))


@section.case("an nnx module's state")
def _(devices):
    from flax import nnx

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    return call(lambda s, x: nnx.merge(graph, s)(x), state, array(8, 4))


@section.case("static arguments by position")
def _(devices):
    f = lambda x, n, kind: jnp.tile(x, n) if kind == "tile" else x
    return call(f, array(4), 3, "tile", jit={"static_argnums": (1, 2)})


@section.case("static arguments by name")
def _(devices):
    f = lambda x, *, n: jnp.tile(x, n)
    return call(f, array(4), n=3, jit={"static_argnames": "n"})


class Hashable:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Hashable) and other.n == self.n

    def __hash__(self):
        return hash(self.n)


@section.case("static arguments that are objects of the user's", by_program=True)
def _(devices):
    f = lambda x, config: jnp.tile(x, config.n)
    return call(f, array(4), Hashable(3), jit={"static_argnums": 1})


@section.case("static arguments that are functions")
def _(devices):
    f = lambda x, g: g(x)
    return call(f, array(4), jnp.tanh, jit={"static_argnums": 1})


@section.case("keyword arguments")
def _(devices):
    return call(lambda x, y: x - y, y=array(4, seed=1), x=array(4))


@section.case("keyword-only arguments and defaults")
def _(devices):
    def f(x, *, scale, shift=2.0):
        return x * scale + shift

    return call(f, array(4), scale=array(4, seed=1))


@section.case("a function that takes *args and **kwargs")
def _(devices):
    f = lambda *args, **kwargs: sum(args) + kwargs["a"] * kwargs["b"]
    return call(f, array(4), array(4, seed=1), b=array(4, seed=2), a=array(4, seed=3))


@section.case("unused arguments, dropped")
def _(devices):
    return call(lambda x, y, z: x + z, array(4), array(100), array(4, seed=2))


@section.case("unused arguments with keep_unused")
def _(devices):
    return call(lambda x, y: x + 1, array(4), array(100), jit={"keep_unused": True})


@section.case("results that are arguments, and the same result twice")
def _(devices):
    def f(x, y):
        z = x + y
        return x, z, z, y

    return call(f, array(4), array(4, seed=1))


@section.case("several signatures of one function")
def _(devices):
    import orbax_aot as oaot

    def run(fns):
        f = fns["f"]
        return [f(array(2)), f(array(3)), f(array(2, dtype=np.int32)), f(array(2, 2)), f(array(2))]

    return Program({"f": oaot.jit(lambda x: x * 2 + 1)}, run)


@section.case("methods, partials and callable objects")
def _(devices):
    import orbax_aot as oaot

    class Scale:
        def __init__(self, by):
            self.by = by

        def apply(self, x):
            return x * self.by

        def __call__(self, x):
            return x + self.by

    scale = Scale(3.0)
    fns = {
        "method": oaot.jit(scale.apply),
        "object": oaot.jit(scale),
        "partial": oaot.jit(functools.partial(lambda n, x: x**n, 2)),
    }
    return Program(fns, lambda fns: {name: fns[name](array(4)) for name in fns})

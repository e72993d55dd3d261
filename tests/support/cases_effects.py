"""Calls back into Python, prints, checks and tokens."""

from __future__ import annotations

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support_case import WITH_LIVE, Program, Section, array, call, put

import orbax_aot as oaot

section = Section("Effects")


def logged(fun, *args, log: list, **jit) -> Program:
    """The program of a function whose callbacks append to `log`; what they appended is part of the result."""

    def run(fns):
        del log[:]
        outputs = fns["f"](*args)
        jax.block_until_ready(outputs)
        jax.effects_barrier()
        return outputs, list(log)

    return Program({"f": oaot.jit(fun, **jit)}, run)


def printed(fun, *args) -> Program:
    """The program of a function that prints; what it printed is part of the result."""

    def run(fns):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            outputs = jax.block_until_ready(fns["f"](*args))
            jax.effects_barrier()
        return outputs, sorted(out.getvalue().splitlines())

    return Program({"f": oaot.jit(fun)}, run)


@section.case("jax.debug.print", expected=WITH_LIVE)
def _(devices):
    def f(x):
        jax.debug.print("sum {s}", s=jnp.sum(x))
        return x * 2

    return printed(f, array(4))


@section.case("jax.debug.print, ordered", expected=WITH_LIVE)
def _(devices):
    def f(x):
        jax.debug.print("first {s}", s=jnp.sum(x), ordered=True)
        jax.debug.print("second {s}", s=jnp.max(x), ordered=True)
        return x * 2

    return printed(f, array(4))


@section.case("jax.debug.print over a mesh", devices=4, expected=WITH_LIVE)
def _(devices):
    mesh = Mesh(np.array(devices), ("a",))

    def f(x):
        jax.debug.print("sum {s}", s=jnp.sum(x))
        return x * 2

    return printed(f, put(array(8), NamedSharding(mesh, P("a"))))


@section.case("jax.debug.callback", expected=WITH_LIVE)
def _(devices):
    log: list = []

    def f(x):
        jax.debug.callback(lambda s: log.append(float(s)), jnp.sum(x))
        return x * 2

    return logged(f, array(4), log=log)


@section.case("jax.debug.callback in a scan", expected=WITH_LIVE)
def _(devices):
    log: list = []

    def f(x):
        def body(c, _):
            jax.debug.callback(lambda s: log.append(float(s)), c, ordered=True)
            return c + 1, None

        return jax.lax.scan(body, jnp.sum(x), None, 3)[0]

    return logged(f, array(4), log=log)


@section.case("pure_callback", expected=WITH_LIVE)
def _(devices):
    def f(x):
        return jax.pure_callback(
            lambda v: np.asarray(v) * 3, jax.ShapeDtypeStruct((4,), np.float32), x
        )

    return call(f, array(4))


@section.case("two pure_callbacks that must not be swapped", expected=WITH_LIVE)
def _(devices):
    shape = jax.ShapeDtypeStruct((4,), np.float32)

    def f(x):
        y = jax.pure_callback(lambda v: np.asarray(v) + 100, shape, x)
        return jax.pure_callback(lambda v: np.asarray(v) * 2, shape, y), y

    return call(f, array(4))


@section.case("pure_callback over a mesh", devices=4, expected=WITH_LIVE)
def _(devices):
    mesh = Mesh(np.array(devices), ("a",))

    def f(x):
        shape = jax.ShapeDtypeStruct((8,), np.float32)
        return jax.pure_callback(lambda v: np.asarray(v) * 3, shape, x)

    return call(f, put(array(8), NamedSharding(mesh, P("a"))))


for _ordered in (False, True):

    @section.case(f"io_callback{', ordered' if _ordered else ''}", expected=WITH_LIVE)
    def _(devices, ordered=_ordered):
        log: list = []

        def f(x):
            def record(v):
                log.append(float(v))
                return np.float32(len(log))

            shape = jax.ShapeDtypeStruct((), np.float32)
            first = io_callback(record, shape, jnp.sum(x), ordered=ordered)
            second = io_callback(record, shape, first + 10, ordered=ordered)
            return x + second

        return logged(f, array(4), log=log)


@section.case("io_callback with donation", expected=WITH_LIVE)
def _(devices):
    log: list = []
    x = jax.device_put(array(4))

    def f(x):
        io_callback(lambda v: log.append(float(v)), None, jnp.sum(x), ordered=True)
        return x + 1

    def run(fns):
        del log[:]
        y = jax.block_until_ready(fns["f"](x))
        jax.effects_barrier()
        return y, x.is_deleted(), list(log)

    return Program({"f": oaot.jit(f, donate_argnums=0)}, run)


@section.case("custom_jvp around pure_callback, differentiated", expected=WITH_LIVE)
def _(devices):
    shape = jax.ShapeDtypeStruct((4,), np.float32)

    @jax.custom_jvp
    def sine(x):
        return jax.pure_callback(lambda v: np.sin(np.asarray(v)), shape, x)

    sine.defjvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    return call(lambda x: jax.grad(lambda v: sine(v).sum())(x) + sine(x), array(4))


@section.case("checkify, functionalised: errors are values", by_program=True, remap=False)
def _(devices):
    def f(x):
        checkify.check(jnp.all(x > 0), "not positive: {m}", m=jnp.min(x))
        return jnp.log(x)

    checked = checkify.checkify(f)

    def run(fns):
        error, y = fns["f"](np.abs(array(4)) + 1)
        bad, _ = fns["f"](-np.abs(array(4)) - 1)
        return y, jax.tree.leaves(error), jax.tree.leaves(bad)

    return Program({"f": oaot.jit(checked)}, run)


@section.case("jax_debug_nans: the operation that made a NaN is found", may_compile=True)
def _(devices):
    def run(fns):
        fine = jax.block_until_ready(fns["f"](np.ones(4, np.float32)))
        try:
            jax.block_until_ready(fns["f"](-np.ones(4, np.float32)))
        except FloatingPointError as e:
            return fine, type(e).__name__
        return fine, "nothing raised"

    f = oaot.jit(lambda x: jnp.log(x))
    return Program({"f": f}, run, lambda: jax.debug_nans(True))


@section.case("tokens made and used inside")
def _(devices):
    def f(x):
        jax.lax.after_all(jax.lax.create_token(x), jax.lax.create_token(x))
        return x * 2

    return call(f, array(4))


@section.case("tokens as arguments and results", by_program=True)
def _(devices):
    token = jax.lax.create_token(1.0)
    f = oaot.jit(lambda token, x: (x * 2, jax.lax.after_all(token)))

    def run(fns):
        y, new = fns["f"](token, array(4))
        return y, type(new).__name__

    return Program({"f": f}, run)

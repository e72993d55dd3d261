"""What programs are made of: control flow, differentiation, kernels, linear algebra."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support_case import Section, Unavailable, array, call, put

section = Section("Programs")

SQUARE = array(6, 6)
POSITIVE = SQUARE @ SQUARE.T + 10 * np.eye(6, dtype=np.float32)


def _add(title: str, fun, *args, **options) -> None:
    section.case(title, **options)(lambda devices: call(fun, *args))


_add(
    "cond, switch and select",
    lambda x, i: (
        jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        jax.lax.switch(i, [lambda v: v, lambda v: v * 2, lambda v: v * 3], x),
        jnp.where(x > 0, x, -x),
    ),
    array(4),
    2,
)
_add("while_loop", lambda x: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, x), 3)
_add("fori_loop", lambda x: jax.lax.fori_loop(0, 5, lambda i, c: c + i, x), array(4))
_add("scan", lambda x: jax.lax.scan(lambda c, v: (c + v, c * v), 0.0, x), array(8))
_add("associative_scan", lambda x: jax.lax.associative_scan(jnp.add, x), array(8))
_add("map and vmap", lambda x: (jax.lax.map(jnp.sum, x), jax.vmap(jnp.sum)(x)), array(4, 3))
_add("nested jit", lambda x: jax.jit(jnp.sin)(jax.jit(lambda v: v * 2)(x)), array(4))


@section.case("scan over layers with remat, differentiated")
def _(devices):
    layers = {"w": array(4, 8, 8), "b": array(4, 8)}

    @jax.checkpoint
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), None

    def f(layers, x):
        return jax.value_and_grad(lambda p: jax.lax.scan(layer, x, p)[0].sum())(layers)

    return call(f, layers, array(2, 8))


@section.case("linen: nn.scan over nn.remat blocks")
def _(devices):
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(nn.LayerNorm()(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return scanned()(x, None)[0]

    model = Model()
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8)))
    params = jax.tree.map(lambda s: array(*s.shape), shapes)
    return call(lambda p, x: jax.grad(lambda p: model.apply(p, x).sum())(p), params, array(2, 8))


@section.case("custom_vjp")
def _(devices):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x) * 2,))
    return call(lambda x: jax.grad(lambda v: f(v).sum())(x), array(4))


@section.case("custom_jvp")
def _(devices):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(p[0]), t[0] * 3))
    return call(lambda x: jax.jacfwd(f)(x), array(4))


_add("hessian, jvp and vjp", lambda x: jax.hessian(lambda v: jnp.sum(v**3))(x), array(4))
_add("optimization_barrier", lambda x: jax.lax.optimization_barrier((x * 2, x)), array(4))
_add("named_scope and named_call", jax.named_call(lambda x: x * 2, name="scaled"), array(4))
_add("dtype promotion and bitcasts", lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), array(4))
_add(
    "convolution",
    lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"),
    array(1, 2, 8, 8),
    array(3, 2, 3, 3),
)
_add("attention", lambda q: jax.nn.dot_product_attention(q, q, q), array(1, 8, 2, 4))
_add(
    "dot_general in int8",
    lambda x: jax.lax.dot(x, x.T, preferred_element_type=jnp.int32),
    array(4, 8, dtype=np.int8),
)
_add(
    "ragged_dot",
    lambda x, w, n: jax.lax.ragged_dot(x, w, n),
    array(6, 4),
    array(2, 4, 3),
    np.array([2, 4], np.int32),
)
_add(
    "gather, scatter and dynamic slices",
    lambda x, i: (x[i], x.at[i].add(1.0), jax.lax.dynamic_slice(x, (i[0],), (2,))),
    array(8),
    np.array([1, 3], np.int32),
)
_add(
    "sort, argsort and top-k",
    lambda x: (jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 3)),
    array(32),
)
_add("approx_max_k", lambda x: jax.lax.approx_max_k(x, 3), array(32))
_add(
    "unique with a size, searchsorted, histogram",
    lambda x: (jnp.unique(x, size=4), jnp.searchsorted(jnp.sort(x), x), jnp.histogram(x, 4)),
    array(16),
)
_add(
    "FFT",
    lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.fft2(x.reshape(4, 4))),
    array(16),
)
_add(
    "random distributions",
    lambda k: (
        jax.random.normal(k, (3,)),
        jax.random.gamma(k, 2.0, (3,)),
        jax.random.categorical(k, jnp.ones(4)),
        jax.random.permutation(k, 8),
    ),
    np.array([0, 1], np.uint32),
)

_LAPACK = {
    "cholesky": lambda a: jnp.linalg.cholesky(a),
    "qr": lambda a: jnp.linalg.qr(a),
    "svd": lambda a: jnp.linalg.svd(a),
    "eigh": lambda a: jnp.linalg.eigh(a),
    "eig": lambda a: jnp.linalg.eig(a),
    "schur": lambda a: jax.scipy.linalg.schur(a),
    "lu and det": lambda a: (jax.scipy.linalg.lu(a), jnp.linalg.det(a), jnp.linalg.slogdet(a)),
    "inverse and pseudo-inverse": lambda a: (jnp.linalg.inv(a), jnp.linalg.pinv(a)),
    "triangular solve": lambda a: jax.scipy.linalg.solve_triangular(a, a[0]),
    "hessenberg and tridiagonal": lambda a: (
        jax.lax.linalg.hessenberg(a),
        jax.lax.linalg.tridiagonal(a),
    ),
}
for _name, _fun in _LAPACK.items():
    _add(f"LAPACK: {_name}", _fun, POSITIVE)

_add(
    "linear solves: solve, lstsq, cg, gmres",
    lambda a, b: (
        jnp.linalg.solve(a, b),
        jnp.linalg.lstsq(a, b)[0],
        jax.scipy.sparse.linalg.cg(lambda v: a @ v, b)[0],
        jax.scipy.sparse.linalg.gmres(lambda v: a @ v, b)[0],
    ),
    POSITIVE,
    array(6),
)
_add(
    "custom_linear_solve, differentiated",
    lambda a, b: jax.grad(lambda b: jnp.linalg.solve(a, b).sum())(b),
    POSITIVE,
    array(6),
)


@section.case("LAPACK over a mesh", devices=4)
def _(devices):
    mesh = Mesh(np.array(devices), ("a",))
    x = put(np.stack([POSITIVE] * 4), NamedSharding(mesh, P("a")))
    return call(lambda x: jnp.linalg.cholesky(x), x)


@section.case("sparse BCOO", by_program=True)
def _(devices):
    from jax.experimental import sparse

    data, indices = array(3), np.array([[0, 1], [2, 3], [3, 0]], np.int32)
    matrix = sparse.BCOO((jax.device_put(data), jax.device_put(indices)), shape=(4, 4))
    return call(lambda m, x: (m @ x, m.T.todense(), m * 2), matrix, array(4))


@section.case("Pallas in interpret mode")
def _(devices):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2 + pl.program_id(0)

    def f(x):
        return pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[pl.BlockSpec((4, 4), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((4, 4), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 4), jnp.float32),
            interpret=True,
        )(x)

    return call(f, array(8, 4))


@section.case("custom_partitioning", devices=4)
def _(devices):
    mesh = Mesh(np.array(devices), ("a",))

    @custom_partitioning
    def double(x):
        return x * 2

    def partition(mesh, arg_shapes, result_shape):
        sharding = arg_shapes[0].sharding
        return mesh, lambda x: x * 2, sharding, (sharding,)

    double.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i -> i",
    )
    return call(lambda x: double(x) + 1, put(array(8), NamedSharding(mesh, P("a"))))


@section.case("FFI calls to jaxlib's own targets")
def _(devices):
    if "lapack_sgeqrf_ffi" not in _registered():
        raise Unavailable("no such FFI target")

    def f(x):
        return jax.ffi.ffi_call(
            "lapack_sgeqrf_ffi",
            (jax.ShapeDtypeStruct((6, 6), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)),
            input_layouts=[(0, 1)],
            output_layouts=[(0, 1), (0,)],
            input_output_aliases={0: 0},
        )(x)

    return call(f, POSITIVE)


def _registered() -> set[str]:
    return set(getattr(jax.ffi, "registered_ffi_targets", lambda p: {"lapack_sgeqrf_ffi"})("cpu"))


@section.case("dynamic custom ops: cumsum, cumlogsumexp, convolve, interp")
def _(devices):
    f = lambda x: (
        jnp.cumsum(x),
        jax.lax.cumlogsumexp(x),
        jnp.convolve(x, x),
        jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    )
    return call(f, array(16))


@section.case(
    "special functions",
)
def _(devices):
    f = lambda x: (
        jax.scipy.special.gammaln(x),
        jax.scipy.special.erf(x),
        jax.scipy.special.i0(x),
        jax.nn.softmax(x),
    )
    return call(f, np.abs(array(8)) + 1)


@section.case("debug_infs, jax.checking_leaks and other contexts do not change the program")
def _(devices):
    return call(lambda x: x * 2, array(4), context=lambda: jax.default_matmul_precision("highest"))

"""What the processes of `test_special_programs.py` and `test_states.py` do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen, nnx
from flax.training import train_state
from programs import digest, mesh_of, sharded
from watching import watching

import orbax_aot as oaot
from orbax_aot import executable as executable_lib


def manager(path):
    return ocp.CheckpointManager(path, item_handlers=oaot.AotHandler())


def report_of(fns):
    return {
        name: [r.verdict.name, [str(reason) for reason in r.reasons]]
        for name, r in fns.report.items()
    }


# -- programs that are easy to break ----------------------------------------------------------------------------------


def symmetric():
    a = np.random.default_rng(3).normal(size=(6, 6)).astype(np.float32)
    return a @ a.T + 6 * np.eye(6, dtype=np.float32)


def svd(a):
    return jnp.linalg.svd(a)


def eigh(a):
    return jnp.linalg.eigh(a)


def cholesky(a):
    return jnp.linalg.cholesky(a)


def qr(a):
    return jnp.linalg.qr(a)


def solve(a):
    return jax.scipy.linalg.solve_triangular(a, jnp.ones(6), lower=True)


def sort(a):
    """Cannot be serialized once it has run (on the CPU, with XLA as it is in jax 0.10.2 to 0.12.0.1)."""
    return jnp.sort(a, axis=0), jnp.argsort(a.ravel())


def random(a):
    key = jax.random.key(7)
    return a + jax.random.normal(key, a.shape), jax.random.permutation(key, 6)


def scan(a):
    return jax.lax.scan(lambda c, x: (jnp.tanh(c @ a + x), c.sum()), a, a)


def fft(a):
    return jnp.fft.fft2(a)


def conv(a):
    image, kernel = a[None, None], a[None, None, :3, :3]
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


def low_precision(a):
    return a.astype(jnp.bfloat16) * 2, a.astype(jnp.float16).sum(), (a > 0), a.astype(jnp.int8)


LAPACK = {f.__name__: f for f in (svd, eigh, cholesky, qr, solve)}
OTHERS = {f.__name__: f for f in (sort, random, scan, fft, conv, low_precision)}


def save_special(path):
    fns = {name: oaot.jit(f) for name, f in (LAPACK | OTHERS).items()}
    results = {name: digest(f(symmetric())) for name, f in fns.items()}
    with manager(path) as mngr:
        mngr.save(1, args=oaot.AotSave({"a": symmetric()}, fns=fns))
    return results


def run_special(path, name):
    """Runs one saved function without its source."""
    with manager(path) as mngr:
        _, fns = mngr.restore(1, args=oaot.AotRestore(fns=[name]))
    return [digest(fns[name](symmetric())), *report_of(fns)[name]]


# -- executables that were not compiled here --------------------------------------------------------------------------


def busy(x, w):
    """Enough fusions for a serialized cache hit to lose functions, if it loses any."""
    for i in range(4):
        x = jnp.tanh(x @ w) + jnp.sin(x) * i
        x = x / (1e-3 + jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)))
    return jax.nn.softmax(x), jnp.cumsum(x, axis=0)


def busy_arguments():
    rng = np.random.default_rng(1)
    return rng.normal(size=(8, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)


def compile_busy(path=None):
    """Runs `busy` through the persistent cache; saves it where a path is given; tells of cache hits."""
    with watching() as watched:
        f = oaot.jit(busy)
        result = digest(f(*busy_arguments()))
    hits = len(watched.named("/jax/compilation_cache/cache_hits"))
    if path is not None:
        with manager(path) as mngr:
            mngr.save(1, args=oaot.AotSave({"a": jnp.ones(2)}, fns={"busy": f}))
    return {"result": result, "hits": hits}


def rerun(path, save_to=None, live=False):
    """Restores `busy`, runs it, and saves it again where told; tells how often it was serialized."""
    f = oaot.jit(busy)
    with manager(path) as mngr:
        fns = {"busy": f} if live else None
        state, fns = mngr.restore(mngr.latest_step(), args=oaot.AotRestore(fns=fns))
    with watching() as watched:
        result = digest(fns.busy(*busy_arguments()))
    before = executable_lib.counters["serializations"]
    if save_to is not None:
        with manager(save_to) as mngr:
            mngr.save(1, args=oaot.AotSave(state, fns={"busy": fns.busy}))
    return {
        "result": result,
        "report": report_of(fns)["busy"],
        "work": watched.work("busy"),
        "serializations": executable_lib.counters["serializations"] - before,
    }


# -- states -----------------------------------------------------------------------------------------------------------


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = jnp.tanh(linen.Dense(16)(x))
        x = linen.Dropout(0.2, deterministic=not train)(x)
        return linen.Dense(4)(x)


def make_linen_state(mesh=None):
    model = Net()
    params = model.init(jax.random.key(0), jnp.ones((2, 8)), train=False)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    if mesh is None:
        return state
    place = lambda x: jax.device_put(
        x, sharded(mesh, *([None] * (x.ndim - 1) + ["model"])[: x.ndim])
    )
    return state.replace(
        params=jax.tree.map(place, state.params),
        opt_state=jax.tree.map(
            lambda x: jax.device_put(x, sharded(mesh)) if x.ndim == 0 else place(x), state.opt_state
        ),
    )


def linen_step(state, batch, key):
    def loss_fn(params):
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        logits = state.apply_fn({"params": params}, batch, train=True, rngs=rngs)
        return jnp.mean(logits**2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def linen_predict(params, batch):
    return Net().apply({"params": params}, batch, train=False)


def nnx_model():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    return Block(nnx.Rngs(0))


def nnx_step(graphdef):
    def step(state, batch):
        model = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), nnx.state(grads))
        return params, {"loss": loss}

    return step


BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def save_linen(path, sharded_over_four=False):
    mesh = mesh_of([0, 1, 2, 3]) if sharded_over_four else None
    step = oaot.jit(linen_step, donate_argnums=0)
    predict = oaot.jit(linen_predict)
    state = make_linen_state(mesh)
    key = jax.random.key(5)
    batch = BATCH if mesh is None else jax.device_put(BATCH, sharded(mesh, "data", None))
    for _ in range(2):
        state, _ = step(state, batch, key)
    predict(state.params, batch)
    with manager(path) as mngr:
        mngr.save(2, args=oaot.AotSave(state, fns={"step": step, "predict": predict}))
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]).hex())
    return {"losses": losses, "last": digest((state.params, state.opt_state, state.step))}


def resume_linen(path, ids=None, abstract_step=False):
    """Resumes with a target whose step is a Python integer, as in a new TrainState, or an abstract array."""
    mesh = None if ids is None else mesh_of(ids)
    step = oaot.jit(linen_step, donate_argnums=0)
    state = make_linen_state(mesh)
    if abstract_step:
        state = state.replace(step=jnp.zeros((), jnp.int32))
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with watching() as watched:
        with manager(path) as mngr:
            args = oaot.AotRestore(target, fns={"step": step})
            state, fns = mngr.restore(2, args=args)
        weak = bool(jax.typeof(state.step).weak_type)
        key = jax.random.key(5)
        batch = BATCH if mesh is None else jax.device_put(BATCH, sharded(mesh, "data", None))
        losses = []
        for _ in range(5):
            state, metrics = step(state, batch, key)
            losses.append(float(metrics["loss"]).hex())
    return {
        "losses": losses,
        "last": digest((state.params, state.opt_state, state.step)),
        "type": type(state).__name__,
        "weak": weak,
        "report": report_of(fns)["step"],
        "work": watched.work("linen_step"),
    }


def resume_linen_without_source(path):
    """Restores plain dictionaries and calls both functions with them; the model is never named."""
    with manager(path) as mngr:
        state, fns = mngr.restore(2, args=oaot.AotRestore())
    logits = fns.predict(state["params"], BATCH)
    losses = []
    for _ in range(5):
        state, metrics = fns.step(state, BATCH, jax.random.key(5))
        losses.append(float(metrics["loss"]).hex())
    return {
        "losses": losses,
        "types": [type(state).__name__, type(state["params"]).__name__, type(metrics).__name__],
        "keys": sorted(state),
        "logits": list(logits.shape),
        "report": report_of(fns)["step"],
    }


def save_nnx(path):
    graphdef, state = nnx.split(nnx_model())
    step = oaot.jit(nnx_step(graphdef), donate_argnums=0)
    state, _ = step(state, BATCH)
    with manager(path) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns={"step": step}))
    losses = []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]).hex())
    return {"losses": losses, "last": digest(state)}


def resume_nnx(path, as_plain):
    """Restores an `nnx.State` with its live step, or plain dictionaries without source."""
    graphdef, state = nnx.split(nnx_model())
    step = oaot.jit(nnx_step(graphdef), donate_argnums=0)
    with watching() as watched:
        with manager(path) as mngr:
            args = (
                oaot.AotRestore()
                if as_plain
                else oaot.AotRestore(
                    jax.tree.map(ocp.utils.to_shape_dtype_struct, state), fns={"step": step}
                )
            )
            state, fns = mngr.restore(1, args=args)
        losses = []
        for _ in range(5):
            state, metrics = fns.step(state, BATCH)
            losses.append(float(metrics["loss"]).hex())
    return {
        "losses": losses,
        "last": digest(state),
        "type": type(state).__name__,
        "report": report_of(fns)["step"],
        "work": watched.work("step"),
    }

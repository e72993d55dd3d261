"""The process with the source: trains on a mesh of (2, 4) devices, saves, and notes what comes after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from serve_inputs import MORE, features, mesh_of, tokens
from serve_models import (
    Classifier,
    columns_over_model,
    language_state,
    language_step,
    mlp,
    mlp_params,
    mlp_step,
)

import orbax_aot as oaot


def save(path, step, state, fns, **options):
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(step, args=oaot.AotSave(state, fns=fns, **options))
        mngr.wait_until_finished()


def train_all(root):
    """Trains and saves each model below `root`; returns what it computes afterwards, bit by bit."""
    mesh = mesh_of((2, 4))
    return {
        "language": train_language(f"{root}/language", mesh),
        "nnx": train_nnx(f"{root}/nnx", mesh),
        "mlp": train_mlp(f"{root}/mlp", mesh),
    }


def train_language(path, mesh):
    shardings = columns_over_model(jax.eval_shape(language_state), mesh)
    state = jax.jit(language_state, out_shardings=shardings)()
    step = oaot.jit(language_step, donate_argnums=0, out_shardings=(shardings, None))
    apply = state.apply_fn

    @oaot.jit
    def language(params, x):
        return apply({"params": params}, x)

    for number in range(3):
        state, _ = step(state, tokens(number, mesh))
    logits = language(state.params, tokens(99, mesh))
    save(path, 3, state, {"train_step": step, "predict": language})
    losses = []
    for number in range(3, 3 + MORE):
        state, metrics = step(state, tokens(number, mesh))
        losses.append(float(metrics["loss"]))
    return {"logits": np.asarray(logits).tolist(), "losses": losses}


def train_nnx(path, mesh):
    graphdef, state = nnx.split(Classifier(nnx.Rngs(0)))
    state = jax.device_put(state, columns_over_model(state, mesh))

    @oaot.jit
    def classify(state, x):
        return nnx.merge(graphdef, state)(x)

    @oaot.jit
    def train_step(state, x):
        loss_of = lambda s: jnp.mean((nnx.merge(graphdef, s)(x) - 1.0) ** 2)
        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda s, g: s - 0.05 * g, state, grads), loss

    for number in range(3):
        state, _ = train_step(state, features(number, mesh))
    state = jax.device_put(state, columns_over_model(state, mesh))
    logits = classify(state, features(99, mesh))
    save(path, 3, state, {"predict": classify})
    return {"logits": np.asarray(logits).tolist()}


def train_mlp(path, mesh):
    params = mlp_params()
    shardings = columns_over_model(params, mesh)
    params = jax.device_put(params, shardings)
    step = oaot.jit(mlp_step, out_shardings=(shardings, None))
    out = {
        "logits": NamedSharding(mesh, P("data")),
        "hidden": NamedSharding(mesh, P("data", "model")),
    }
    predict = oaot.jit(mlp, out_shardings=out)
    for number in range(3):
        params, _ = step(params, features(number, mesh))
    result = predict(params, features(99, mesh))
    save(path, 3, params, {"train_step": step, "predict": predict})
    losses = []
    for number in range(3, 3 + MORE):
        params, loss = step(params, features(number, mesh))
        losses.append(float(loss))
    return {"logits": np.asarray(result["logits"]).tolist(), "losses": losses}

"""The models that are trained and saved: a linen transformer LM, an nnx model and an MLP of dictionaries."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, LENGTH, WIDTH, BATCH = 32, 8, 16, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def language_state() -> TrainState:
    model = LanguageModel()
    params = model.init(jax.random.key(0), np.zeros((1, LENGTH), np.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


def language_loss(state, params, tokens):
    logits = state.apply_fn({"params": params}, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def language_step(state, tokens):
    loss, grads = jax.value_and_grad(lambda p: language_loss(state, p, tokens))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(x))))


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


def mlp_params() -> dict[str, Layer]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"first": Layer(normal(8, 16), normal(16)), "last": Layer(normal(16, 4), normal(4))}


def mlp(params, x):
    hidden = jnp.tanh(x @ params["first"].w + params["first"].b)
    return {"logits": hidden @ params["last"].w + params["last"].b, "hidden": hidden}


def mlp_step(params, x):
    loss_of = lambda p: jnp.mean((mlp(p, x)["logits"] - 1.0) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss


def columns_over_model(tree, mesh):
    """Splits the last dimension of every matrix over `model` where it divides; leaves the rest whole."""

    def sharding(leaf):
        split = leaf.ndim >= 2 and leaf.shape[-1] % mesh.shape["model"] == 0
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "model") if split else P())

    return jax.tree.map(sharding, tree)

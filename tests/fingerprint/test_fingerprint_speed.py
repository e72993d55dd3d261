"""How long a fingerprint takes: milliseconds where tracing takes seconds."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# CPU time of one thread, the least of several: a busy machine must not fail the test.
_SCRIPT = """
import time
import flax.linen as nn
import jax, jax.numpy as jnp, optax
from flax.training import train_state
from orbax_aot.fingerprint import fingerprint_call


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=not train)(h, h)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(self.width)(h))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(100, 64)(tokens)
        for _ in range(24):
            x = Block(64)(x, train)
        return nn.Dense(100)(x)


class State(train_state.TrainState):
    key: jax.Array


def step(state, tokens):
    def loss(params):
        logits = state.apply_fn({"params": params}, tokens, rngs={"dropout": state.key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def init(key):
    model = Model()
    params = model.init({"params": key, "dropout": key}, jnp.zeros((2, 8), "int32"))["params"]
    schedule = optax.cosine_decay_schedule(1e-3, 90)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return State.create(apply_fn=model.apply, params=params, tx=tx, key=key)


state = jax.eval_shape(init, jax.random.key(0))
args = state, jax.ShapeDtypeStruct((2, 8), "int32")
seconds = []
for _ in range(8):
    start = time.thread_time()
    found = fingerprint_call(step, args, {}, {"donate_argnums": 0})
    seconds.append(time.thread_time() - start)
    assert found.undecidable == (), found.undecidable
print(len(jax.tree.leaves(state)), seconds[0], min(seconds[1:]))
"""


@pytest.fixture(scope="module")
def measured() -> tuple[float, float]:
    """(first, best later) CPU seconds, the least of three fresh processes."""
    best = (float("inf"), float("inf"))
    for _ in range(3):
        output = subprocess.run(
            [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        ).stdout.split()  # fmt: skip
        assert int(output[0]) > 24 * 16 * 3
        best = min(best[0], float(output[1])), min(best[1], float(output[2]))
    return best


def test_a_step_of_a_24_layer_transformer_takes_less_than_20_ms(measured):
    assert measured[1] < 0.020


def test_the_first_fingerprint_of_a_process_looks_at_libraries_once(measured):
    """About 0.2 s on an idle core, nearly all of it done once; busy cores are slower."""
    assert measured[0] < 0.340

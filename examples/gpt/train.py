"""Trains a small GPT on the text of Python's own documentation; goes on where it was when run again.

    python examples/gpt/train.py --checkpoints /tmp/gpt --steps 200

The blocks are one `nn.scan` over a rematerialized block (Flax linen), so that the program does not
grow with the number of layers. Every save holds the weights, the compiled train step and a compiled
sampler, which `sample.py` runs without any of this code.
"""

from __future__ import annotations

import argparse
import os
import time
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import orbax_aot as oaot

SEED = 0
CONTEXT = 64
BATCH_SIZE = 16
VOCABULARY = 128  # ASCII


class Block(nn.Module):
    """One layer of the transformer, in the form that `nn.scan` asks for."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x), mask)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y), None


class GPT(nn.Module):
    layers: int = 6
    width: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (CONTEXT, self.width))
        x = nn.Embed(VOCABULARY, self.width)(tokens) + positions[: tokens.shape[1]]
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.width, name="blocks")(x, None)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


MODEL = GPT()


def init_state() -> TrainState:
    params = MODEL.init(jax.random.key(SEED), np.zeros((1, CONTEXT), np.int32))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adamw(1e-3))


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def sample(params: dict, tokens: jax.Array, key: jax.Array) -> jax.Array:
    """Writes on after `tokens`, of shape (1, CONTEXT); returns as many new ones."""

    def step(tokens, key):
        logits = MODEL.apply({"params": params}, tokens)[:, -1]
        new = jax.random.categorical(key, logits / 0.8)[:, None].astype(jnp.int32)
        return jnp.concatenate([tokens[:, 1:], new], axis=1), None

    return jax.lax.scan(step, tokens, jax.random.split(key, CONTEXT))[0]


def load_text() -> np.ndarray:
    """Returns the reference that `help()` shows, as ASCII codes."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


def batch_at(text: np.ndarray, step: int) -> np.ndarray:
    """The batch of one step; depends on nothing else, so that a resumed run sees the same order."""
    starts = np.random.default_rng((SEED, step)).integers(0, len(text) - CONTEXT - 1, BATCH_SIZE)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    start = time.perf_counter()

    step_fn = oaot.jit(train_step, donate_argnums=0)
    sample_fn = oaot.jit(sample)
    fns = {"train_step": step_fn, "sample": sample_fn}
    text = load_text()
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        state, restored = init_state(), None
        first_step = mngr.latest_step() or 0
        if first_step:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state, restored = mngr.restore(first_step, args=oaot.AotRestore(target, fns=fns))
        else:
            # Compiled ahead, so that a checkpoint has it though training never calls it.
            sample_fn.compile(state.params, text[None, :CONTEXT], jax.random.key(SEED))

        for step in range(first_step, args.steps):
            state, loss = step_fn(state, batch_at(text, step))
            if step == first_step:
                jax.block_until_ready(loss)
                print(f"first step done in {time.perf_counter() - start:.2f} s")
                if restored is not None:
                    print(restored.report)
            if (step + 1) % args.save_every == 0:
                print(f"step {step + 1}: loss {float(loss):.9g}")
                mngr.save(step + 1, args=oaot.AotSave(state, fns=fns))


if __name__ == "__main__":
    main()

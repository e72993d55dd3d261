"""Trains a convolutional network on handwritten digits with Flax NNX; goes on where it was when run again.

    python examples/vision_nnx/train.py --checkpoints /tmp/digits --steps 200

Batch normalization and dropout make the step change more than weights: the running averages and the
random state travel in the same tree. Every save holds that tree, the compiled train step and the
compiled predict function, which `eval.py` runs without any of this code.
"""

from __future__ import annotations

import argparse
import functools
import os
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

import orbax_aot as oaot

SEED = 0
BATCH_SIZE = 64


class Stage(nnx.Module):
    """Convolution, batch normalization, dropout."""

    def __init__(self, channels: int, width: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(channels, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(nnx.relu(self.norm(self.conv(x))))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = Stage(1, 16, rngs)
        self.second = Stage(16, 32, rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(self.second(self.first(images)), (2, 2), strides=(2, 2))
        return self.head(x.reshape(len(x), -1))


def init() -> dict:
    model = Network(nnx.Rngs(SEED))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)}


def train_step(graph: nnx.GraphDef, state: nnx.State, batch: dict) -> tuple[nnx.State, jax.Array]:
    objects = nnx.merge(graph, state)
    model, optimizer = objects["model"], objects["optimizer"]

    def loss_fn(model: Network) -> jax.Array:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state(objects), loss


def predict(graph: nnx.GraphDef, state: nnx.State, images: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    model.eval()  # running averages instead of those of the batch, no dropout
    return model(images).argmax(axis=-1)


def load_data() -> tuple[dict, dict]:
    """Returns the training split and the 360 images of the test split."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    order = np.random.default_rng(SEED).permutation(len(images))
    split = lambda rows: {"image": images[rows], "label": digits.target[rows].astype(np.int32)}
    return split(order[360:]), split(order[:360])


def batch_at(data: dict, step: int) -> dict:
    """The batch of one step; depends on nothing else, so that a resumed run sees the same order."""
    rows = np.random.default_rng((SEED, step)).integers(0, len(data["label"]), BATCH_SIZE)
    return {name: values[rows] for name, values in data.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    start = time.perf_counter()

    objects = init()
    graph, state = nnx.split(objects)
    step_fn = oaot.jit(functools.partial(train_step, graph), donate_argnums=0)
    predict_fn = oaot.jit(functools.partial(predict, nnx.graphdef(objects["model"])))
    fns = {"train_step": step_fn, "predict": predict_fn}
    train, test = load_data()
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        first_step, restored = mngr.latest_step() or 0, None
        if first_step:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state, restored = mngr.restore(first_step, args=oaot.AotRestore(target, fns=fns))

        for step in range(first_step, args.steps):
            state, loss = step_fn(state, batch_at(train, step))
            if step == first_step:
                jax.block_until_ready(loss)
                print(f"first step done in {time.perf_counter() - start:.2f} s")
                if restored is not None:
                    print(restored.report)
            if (step + 1) % args.save_every == 0:
                hits = predict_fn(state["model"], test["image"]) == test["label"]
                print(f"step {step + 1}: loss {float(loss):.9g}, accuracy {float(hits.mean()):.4f}")
                mngr.save(step + 1, args=oaot.AotSave(state, fns=fns))


if __name__ == "__main__":
    main()

"""Trains a classifier of handwritten digits with Flax linen and survives being killed.

    python examples/linen/train.py --checkpoints /tmp/digits
    python examples/linen/train.py --checkpoints /tmp/digits --devices 8 --mesh data=2,model=2

Every epoch saves the weights and, beside them, the compiled train step and predict function. After
a kill the same command goes on where the last save was, without compiling.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import orbax_aot as oaot

SEED = 0
BATCH_SIZE = 64


class Classifier(nn.Module):
    """A residual MLP: deep enough that compiling it takes seconds."""

    layers: int = 24
    width: int = 64

    @nn.compact
    def __call__(self, images: jax.Array, *, training: bool) -> jax.Array:
        x = nn.Dense(self.width)(images)
        for _ in range(self.layers):
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            y = nn.Dropout(0.1, deterministic=not training)(y)
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(10)(nn.LayerNorm()(x))


MODEL = Classifier()
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, decay_steps=220))


def init_state() -> TrainState:
    params = MODEL.init(jax.random.key(SEED), np.zeros((1, 64), np.float32), training=False)
    return TrainState.create(apply_fn=MODEL.apply, params=params["params"], tx=OPTIMIZER)


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    # The key follows from the step, so a resumed run drops out what the first run would have.
    dropout_key = jax.random.fold_in(jax.random.key(SEED), state.step)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params}, batch["image"], training=True, rngs={"dropout": dropout_key}
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def predict(params: dict, images: jax.Array) -> jax.Array:
    return MODEL.apply({"params": params}, images, training=False).argmax(axis=-1)


def load_data() -> tuple[dict, dict]:
    """Returns the training split and the 360 images of the test split."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:360], order[360:]
    return (
        {"image": images[train], "label": digits.target[train].astype(np.int32)},
        {"image": images[test], "label": digits.target[test].astype(np.int32)},
    )


def batch_at(data: dict, step: int) -> dict:
    """The batch of one step; depends on nothing else, so that a resumed run sees the same order."""
    epoch, i = divmod(step, len(data["label"]) // BATCH_SIZE)
    order = np.random.default_rng((SEED, epoch)).permutation(len(data["label"]))
    rows = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]
    return {"image": data["image"][rows], "label": data["label"][rows]}


def make_mesh(axes: str, first_device: int) -> Mesh:
    """Makes the mesh that `axes` describes, as in "data=2,model=2", from `first_device` on."""
    names, sizes = zip(*(axis.split("=") for axis in axes.split(",")), strict=True)
    shape = tuple(int(size) for size in sizes)
    devices = jax.devices()[first_device : first_device + int(np.prod(shape))]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def shardings_of(tree, mesh: Mesh):
    """Splits the columns of every weight matrix over `model`, its optimizer moments alike."""

    def sharding(leaf) -> NamedSharding:
        split = leaf.ndim == 2 and leaf.shape[1] % mesh.shape["model"] == 0
        return NamedSharding(mesh, P(None, "model") if split else P())

    return jax.tree.map(sharding, tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--mesh", default="data=1,model=1", help="sizes of the axes data and model")
    parser.add_argument("--devices", type=int, help="pretend to have this many CPU devices")
    parser.add_argument("--first-device", type=int, default=0, help="where the mesh begins")
    parser.add_argument("--kill-at-step", type=int, help="die without warning, as a lost machine")
    args = parser.parse_args()
    start = time.perf_counter()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)

    mesh = make_mesh(args.mesh, args.first_device)
    split_batch = NamedSharding(mesh, P("data"))
    abstract_state = jax.eval_shape(init_state)
    shardings = shardings_of(abstract_state, mesh)
    step_fn = oaot.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    predict_fn = oaot.jit(predict)
    fns = {"train_step": step_fn, "predict": predict_fn}

    train, test = load_data()
    test = jax.device_put(test, split_batch)
    steps_per_epoch = len(train["label"]) // BATCH_SIZE

    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, options=options, item_handlers=oaot.AotHandler()) as mngr:
        first_step = mngr.latest_step() or 0
        print(f"starting at step {first_step} on devices {[d.id for d in mesh.devices.flat]}")
        restored = None
        if first_step:
            target = jax.tree.map(lambda x, s: x.update(sharding=s), abstract_state, shardings)
            state, restored = mngr.restore(first_step, args=oaot.AotRestore(target, fns=fns))
        else:
            state = jax.jit(init_state, out_shardings=shardings)()

        for step in range(first_step, args.epochs * steps_per_epoch):
            batch = jax.device_put(batch_at(train, step), split_batch)
            state, metrics = step_fn(state, batch)
            if step == first_step:
                jax.block_until_ready(metrics)
                print(f"first step done in {time.perf_counter() - start:.2f} s")
                if restored is not None:
                    print(restored.report)
            if step + 1 == args.kill_at_step:
                mngr.wait_until_finished()  # leave a whole checkpoint to restart from
                os.kill(os.getpid(), signal.SIGKILL)
            if (step + 1) % steps_per_epoch == 0:
                hits = predict_fn(state.params, test["image"]) == test["label"]
                print(
                    f"step {step + 1}: loss {float(metrics['loss']):.9g}, "
                    f"test accuracy {float(hits.mean()):.4f}"
                )
                mngr.save(step + 1, args=oaot.AotSave(state, fns=fns))


if __name__ == "__main__":
    main()

"""Trains a small latent diffusion model of handwritten digits; goes on where it was when run again.

    python examples/diffusion/train.py --checkpoints /tmp/diffusion --steps 2000

The latents are the digits' principal components. Sampling takes two functions, which share the
weights: `denoise` makes one step back in time, and `decode` turns latents into images. Every save
holds both, compiled, and `sample.py` draws digits with them without any of this code.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import orbax_aot as oaot

SEED = 0
BATCH_SIZE = 256
LATENT = 16
WIDTH = 128
TIMES = 100  # steps from noise to a digit
SAMPLES = 8
OPTIMIZER = optax.adam(1e-3)

BETAS = np.linspace(1e-4, 0.1, TIMES, dtype=np.float32)
KEPT = np.cumprod(1 - BETAS)  # how much of a latent's variance is left at each time


def load_latents() -> tuple[np.ndarray, dict]:
    """Returns the digits as latents of unit variance, and what turns latents into images."""
    images = (load_digits().data / 16).astype(np.float32)
    mean = images.mean(0)
    _, _, basis = np.linalg.svd(images - mean, full_matrices=False)
    latents = (images - mean) @ basis[:LATENT].T
    scale = latents.std(0)
    return latents / scale, {"basis": basis[:LATENT] * scale[:, None], "mean": mean}


def init_state(decoder: dict) -> dict:
    sizes = [LATENT + 10 + 2, WIDTH, WIDTH, LATENT]
    keys = jax.random.split(jax.random.key(SEED), len(sizes) - 1)
    layers = [
        {"w": jax.random.normal(key, (n, m)) / np.sqrt(n), "b": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]
    params = {"layers": layers, "decoder": jax.tree.map(jnp.asarray, decoder)}
    return {"params": params, "optimizer": OPTIMIZER.init(layers)}


def predict_noise(layers: list, latents: jax.Array, labels: jax.Array, time: jax.Array):
    angle = jnp.pi / 2 * time / TIMES
    x = jnp.concatenate(
        [latents, jax.nn.one_hot(labels, 10), jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]], 1
    )
    for layer in layers[:-1]:
        x = jax.nn.silu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def train_step(state: dict, batch: dict, key: jax.Array) -> tuple[dict, jax.Array]:
    time_key, noise_key = jax.random.split(key)
    time = jax.random.randint(time_key, (BATCH_SIZE,), 0, TIMES)
    noise = jax.random.normal(noise_key, (BATCH_SIZE, LATENT))
    kept = jnp.asarray(KEPT)[time][:, None]
    noisy = jnp.sqrt(kept) * batch["latent"] + jnp.sqrt(1 - kept) * noise

    def loss_fn(layers: list) -> jax.Array:
        return jnp.mean((predict_noise(layers, noisy, batch["label"], time) - noise) ** 2)

    params = state["params"]
    loss, grads = jax.value_and_grad(loss_fn)(params["layers"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    layers = optax.apply_updates(params["layers"], updates)
    return {"params": {**params, "layers": layers}, "optimizer": optimizer}, loss


def denoise(params: dict, latents: jax.Array, labels: jax.Array, time: jax.Array, key: jax.Array):
    """Returns `latents` one step nearer to digits; `time` counts down from TIMES - 1 to 0."""
    noise = predict_noise(params["layers"], latents, labels, jnp.full(len(labels), time))
    beta, kept = jnp.asarray(BETAS)[time], jnp.asarray(KEPT)[time]
    mean = (latents - beta / jnp.sqrt(1 - kept) * noise) / jnp.sqrt(1 - beta)
    fresh = jax.random.normal(jax.random.fold_in(key, time), latents.shape)
    return mean + jnp.where(time > 0, jnp.sqrt(beta), 0) * fresh


def decode(params: dict, latents: jax.Array) -> jax.Array:
    """Returns images of 8 by 8 pixels between 0 and 1."""
    flat = latents @ params["decoder"]["basis"] + params["decoder"]["mean"]
    return jnp.clip(flat, 0, 1).reshape(-1, 8, 8)


def batch_at(latents: np.ndarray, labels: np.ndarray, step: int) -> dict:
    """The batch of one step; depends on nothing else, so that a resumed run sees the same order."""
    rows = np.random.default_rng((SEED, step)).integers(0, len(labels), BATCH_SIZE)
    return {"latent": latents[rows], "label": labels[rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()
    start = time.perf_counter()

    latents, decoder = load_latents()
    labels = load_digits().target.astype(np.int32)
    state, restored = init_state(decoder), None
    step_fn = oaot.jit(train_step, donate_argnums=0)
    denoise_fn, decode_fn = oaot.jit(denoise), oaot.jit(decode)
    fns = {"train_step": step_fn, "denoise": denoise_fn, "decode": decode_fn}
    key = jax.random.key(SEED)
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        first_step = mngr.latest_step() or 0
        if first_step:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state, restored = mngr.restore(first_step, args=oaot.AotRestore(target, fns=fns))
        else:
            # Compiled ahead, so that a checkpoint has them though training never calls them.
            noise = jax.ShapeDtypeStruct((SAMPLES, LATENT), np.float32)
            denoise_fn.compile(state["params"], noise, labels[:SAMPLES], np.int32(0), key)
            decode_fn.compile(state["params"], noise)

        for step in range(first_step, args.steps):
            batch = batch_at(latents, labels, step)
            state, loss = step_fn(state, batch, jax.random.fold_in(key, step))
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

"""Draws digits with a checkpoint of `train.py`, without importing any of it.

python examples/diffusion/sample.py --checkpoints /tmp/diffusion --digits 0 1 2 3 4 5 6 7
"""

from __future__ import annotations

import argparse
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_aot as oaot

TIMES = 100  # steps from noise to a digit
SHADES = " .:-=+*#%@"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--digits", type=int, nargs=8, default=[0, 1, 2, 3, 4, 5, 6, 7])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        step = mngr.latest_step()
        state, fns = mngr.restore(step, args=oaot.AotRestore(fns=["denoise", "decode"]))
    print(fns.report)

    params, key = state["params"], jax.random.key(args.seed)
    labels = np.array(args.digits, np.int32)
    size = params["decoder"]["basis"].shape[0]
    latents = np.random.default_rng(args.seed).normal(size=(len(labels), size)).astype(np.float32)
    for time in reversed(range(TIMES)):
        latents = fns.denoise(params, latents, labels, np.int32(time), key)
    images = np.asarray(fns.decode(params, latents))
    for row in np.concatenate(images, axis=1):
        print("".join(2 * SHADES[int(value * 9.99)] for value in row))
    print(f"step {step}: drew {args.digits}, mean brightness {images.mean():.4f}")


if __name__ == "__main__":
    main()

"""Evaluates a checkpoint of `train.py` without importing any of it, nor Flax.

python examples/vision_nnx/eval.py --checkpoints /tmp/digits
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import orbax_aot as oaot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    args = parser.parse_args()

    digits = load_digits()
    rows = np.random.default_rng(0).permutation(len(digits.target))[:360]  # what training left out
    images = (digits.images[rows] / 16).astype(np.float32)[..., None]
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        step = mngr.latest_step()
        state, fns = mngr.restore(step, args=oaot.AotRestore(fns=["predict"]))
    print(fns.report)
    accuracy = (np.asarray(fns.predict(state["model"], images)) == digits.target[rows]).mean()
    print(f"step {step}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

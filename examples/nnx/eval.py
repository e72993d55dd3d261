"""Evaluates a checkpoint of `train.py` without importing any of it.

    python examples/nnx/eval.py --checkpoints /tmp/digits

The program comes out of the checkpoint with the weights.
"""

from __future__ import annotations

import argparse
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import orbax_aot as oaot


def load_test_split() -> tuple[np.ndarray, np.ndarray]:
    """The 360 images that `train.py` leaves out, and their labels."""
    digits = load_digits()
    rows = np.random.default_rng(0).permutation(len(digits.target))[:360]
    return (digits.data[rows] / 16).astype(np.float32), digits.target[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--devices", type=int, help="pretend to have this many CPU devices")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)

    images, labels = load_test_split()
    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        step = mngr.latest_step()
        state, fns = mngr.restore(step, args=oaot.AotRestore(fns=["predict"]))
    print(fns.report)
    accuracy = (np.asarray(fns.predict(state["model"], images)) == labels).mean()
    print(f"step {step}: test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

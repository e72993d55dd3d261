"""Writes text with a checkpoint of `train.py`, without importing any of it.

python examples/gpt/sample.py --checkpoints /tmp/gpt --prompt "The import statement"
"""

from __future__ import annotations

import argparse
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_aot as oaot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--prompt", default="The import statement")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    path = os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        step = mngr.latest_step()
        state, fns = mngr.restore(step, args=oaot.AotRestore(fns=["sample"]))
    print(fns.report)

    (signature,) = fns.sample.signatures
    context = next(leaf.shape[1] for leaf in signature.inputs if leaf.path == "1")
    prompt = args.prompt.encode("ascii")[-context:].rjust(context)
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
    text = fns.sample(state["params"], tokens, jax.random.key(args.seed))
    print(f"step {step}: {args.prompt}{bytes(np.asarray(text[0], np.uint8)).decode()}")


if __name__ == "__main__":
    main()

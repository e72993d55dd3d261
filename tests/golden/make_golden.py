"""Makes the golden checkpoint of this format version by the JAX that is installed. Never changes one that is there.

    python tests/golden/make_golden.py --write

One folder for each format version and JAX: an item as the handler writes it, `expected.json` with the weights and
results, and `SHA256SUMS` of all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WEIGHTS = {"w": [[float(8 * i + j) for j in range(8)] for i in range(4)], "step": 3}
BATCH = [0.5 * i for i in range(8)]


def make_functions() -> dict[str, Any]:
    """Returns the functions that a golden checkpoint holds, each called once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_aot as oaot

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))
    state = {"w": jnp.asarray(WEIGHTS["w"], jnp.float32), "step": jnp.asarray(3, jnp.int32)}
    table = jnp.arange(2048, dtype=jnp.float32)

    @oaot.jit
    def train_step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] * 0.5 + batch, "step": state["step"] + 1}, batch.sum()

    @oaot.jit
    def look_up(x: Any) -> Any:
        return table[:8] * x

    @oaot.jit
    def sharded(w: Any) -> Any:
        return w.sum(axis=0)

    @oaot.jit
    def never_called(x: Any) -> Any:
        return x

    train_step(state, jnp.asarray(BATCH, jnp.float32))
    look_up(jnp.asarray(BATCH, jnp.float32))
    sharded(jax.device_put(state["w"], split))
    return {
        "train_step": train_step,
        "look_up": look_up,
        "sharded": sharded,
        "never_called": never_called,
    }


def expected_results() -> dict[str, Any]:
    """Returns what the functions return, as nested lists, worked out without JAX."""
    weights = WEIGHTS["w"]
    return {
        "train_step": [4, [[0.5 * v + b for v, b in zip(row, BATCH, strict=True)] for row in weights], sum(BATCH)],
        "look_up": [i * b for i, b in enumerate(BATCH)],
        "sharded": [sum(column) for column in zip(*weights, strict=True)],
    }  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "SHA256SUMS"
    }


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    import numpy as np

    import orbax_aot as oaot
    from orbax_aot import manifest

    version = ".".join(map(str, manifest.FORMAT_VERSION))
    folder = HERE / f"format-{version}-jax-{jax.__version__}"
    if folder.exists():
        sys.exit(f"{folder} is there already, and is never changed.")
    item = folder / "item"
    item.mkdir(parents=True)
    weights = {"w": np.asarray(WEIGHTS["w"], np.float32), "step": np.asarray(3, np.int32)}
    handler = oaot.AotHandler()
    handler.save(item, oaot.AotSave(weights, fns=make_functions()))
    handler.finalize(item)
    (folder / "expected.json").write_text(json.dumps(expected_results()) + "\n")
    lines = [f"{digest}  {name}\n" for name, digest in digests(folder).items()]
    (folder / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()

"""Makes a checkpoint, attacks copies of it in every way of the corpus, restores each; prints what came of them.

One JSON line for each attack, on standard output. An attack that ends the process leaves the rest untold.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

import jax
import numpy as np
from absl import logging

import orbax_aot as oaot
from orbax_aot import executable

logging.set_verbosity(logging.FATAL)
WEIGHTS = np.arange(12, dtype=np.float32)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _restore(item: Path) -> dict[str, Any]:
    loads, start = executable.counters["loads"], time.perf_counter()
    restored = oaot.AotHandler().restore(item, oaot.AotRestore(fns={"step": None}))
    report = restored.fns.report["step"]
    return {
        "reasons": [r.code.name for r in report.reasons],
        "text": str(report),
        "verdict": report.verdict.name,
        "weights": np.array_equal(restored.state["w"], WEIGHTS),
        "loads": executable.counters["loads"] - loads,
        "secs": time.perf_counter() - start,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        item = Path(folder) / "item"
        step = oaot.jit(lambda w, x: w * 2 + x)
        step(jax.numpy.asarray(WEIGHTS), 1.0)
        handler = oaot.AotHandler()
        item.mkdir()
        handler.save(item, oaot.AotSave({"w": WEIGHTS}, fns={"step": step}))
        handler.finalize(item)
        print(json.dumps({"name": "", **_restore(item)}), flush=True)
        os.chdir(folder)
        for path in sorted((_HERE / "corpus").glob("*.py")):
            attacked = Path(folder) / path.stem
            shutil.copytree(item, attacked)
            _load(path).attack(attacked / "_aot")
            print(json.dumps({"name": path.stem, **_restore(attacked)}), flush=True)


if __name__ == "__main__":
    main()

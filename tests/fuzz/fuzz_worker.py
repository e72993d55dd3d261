"""Restores damaged checkpoints, one for each line on standard input, and tells on standard output what came of each.

python fuzz_worker.py make FOLDER            makes the checkpoints to damage
python fuzz_worker.py run FOLDER < cases     a case is {"tier": 1, "seed": 7}; tier 3 is verified by signature
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parent))

import fuzz_mutations
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_aot as oaot

logging.set_verbosity(logging.FATAL)
STATE = {"w": np.arange(32, dtype=np.float32).reshape(4, 8), "b": np.arange(8, dtype=np.int32)}
BATCH = np.linspace(0, 1, 8, dtype=np.float32)
_TABLE = np.sin(np.arange(4096, dtype=np.float32))


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def _functions(shift: float) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Returns functions by name, each with arguments to call it with."""

    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] * 0.5 + batch + shift, "b": state["b"] + 1}, (batch**2).sum()

    def table(x: Any) -> Any:
        return jnp.asarray(_TABLE)[:8] * x + shift

    def sharded(w: Any) -> Any:
        return (w @ w.T).sum(axis=0) + shift

    def noise(key: Any, n: Any) -> Any:
        return jax.random.normal(key, (3,)) * n

    split = NamedSharding(_mesh(), PartitionSpec("x", "y"))
    state = jax.tree.map(jnp.asarray, STATE)
    return {
        "step": (oaot.jit(step, donate_argnums=0), (state, jnp.asarray(BATCH))),
        "table": (oaot.jit(table), (jnp.asarray(BATCH),)),
        "sharded": (oaot.jit(sharded), (jax.device_put(STATE["w"], split),)),
        "noise": (oaot.jit(noise), (jax.random.key(7), 2)),
    }


def _copy(args: Any) -> Any:
    is_array = lambda x: (
        isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    return jax.tree.map(
        lambda x: jax.device_put(np.array(x), x.sharding) if is_array(x) else x, args
    )


def _values(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def make(root: Path) -> None:
    """Saves two steps, and both again with signatures where the library is there."""
    key = _make_keys(root)
    for name, policy in (("plain", oaot.Trust.owner()), ("signed", key)):
        if policy is None:
            continue
        for step, shift in ((1, 0.0), (2, 1.0)):
            functions = _functions(shift)
            for fn, args in functions.values():
                fn(*_copy(args))
            handler = oaot.AotHandler(trust=policy)
            with ocp.CheckpointManager(root / name, item_handlers=handler) as manager:
                save = oaot.AotSave(STATE, fns={n: fn for n, (fn, _) in functions.items()})
                manager.save(step, args=save)


def _make_keys(root: Path) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization as s
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        private, public = root / "key.pem", root / "key.pub"
        private.write_bytes(
            key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        )
        public.write_bytes(
            key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
        )
        return oaot.Trust.signed(public, private_key=private)
    except ImportError:
        return None


class Worker:
    """Restores cases in a folder of its own."""

    def __init__(self, root: Path):
        self._root = root
        self._work = root / f"work{os.getpid()}"
        self._calls = _functions(0.0)
        gc.freeze()  # what JAX has made so far is not looked through again after each case
        self._expected = {n: _values(fn(*_copy(a))) for n, (fn, a) in self._calls.items()}

    def run(self, tier: int, seed: int, policy: str) -> dict[str, Any]:
        """Returns what came of one case: verdicts, reasons, and whether weights and results are as they should be."""
        source = self._root / ("signed" if policy == "signed" else "plain")
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(source / "1" / "default", self._work)
        artifact = fuzz_mutations.Artifact(self._work / "_aot", source / "2" / "default" / "_aot")
        name = fuzz_mutations.mutate(artifact, tier, seed)
        trust = oaot.Trust.owner()
        if policy == "signed":
            trust = oaot.Trust.signed(self._root / "key.pub")
        _forget_peak()
        start = time.perf_counter()
        found: dict[str, Any] = {
            "mutation": name,
            "verdicts": {},
            "reasons": [],
            "wrong": [],
            "raised": [],
        }
        # The live function of one; the others from what is saved alone.
        live = {
            n: (self._calls[n][0] if n == "table" and seed % 20 == 0 else None) for n in self._calls
        }
        restored = oaot.AotHandler(trust=trust).restore(self._work, oaot.AotRestore(fns=live))
        weights = jax.tree.map(np.asarray, restored.state)
        found["weights"] = sorted(weights) == sorted(STATE) and all(
            _same([weights[n]], [STATE[n]]) for n in STATE
        )
        for function in self._calls:
            if live[function] is None:
                self._try(function, restored.fns, found)
        reports = dict(restored.fns.report)
        found["verdicts"] = {n: r.verdict.name for n, r in reports.items()}
        found["reasons"] = sorted({x.code.name for r in reports.values() for x in r.reasons})
        found["silent"] = [
            n
            for n, r in reports.items()
            if r.verdict.name not in ("LOADED", "REMAPPED") and not r.reasons
        ]
        found["secs"] = time.perf_counter() - start
        found["peak_mb"] = _peak_mb()
        del restored, reports
        if seed % 25 == 0:
            gc.collect()
        return found

    def _try(self, name: str, fns: Any, found: dict[str, Any]) -> None:
        if fns.report[name].verdict.name == "REFUSED":
            return
        try:
            values = _values(fns[name](*_copy(self._calls[name][1])))
        except Exception as e:
            found["raised"].append(f"{name}: {type(e).__name__}: {str(e)[:200]}")
            return
        if not _same(values, self._expected[name]):
            found["wrong"].append(name)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        // 1024
    )


def main() -> None:
    command, root = sys.argv[1], Path(sys.argv[2])
    root.mkdir(parents=True, exist_ok=True)
    if command == "make":
        make(root)
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever native code prints goes elsewhere
    worker = Worker(root)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            found = worker.run(case["tier"], case["seed"], case["policy"])
        except Exception as e:
            import traceback

            found = {
                "escaped": f"{type(e).__name__}: {e}"[:500],
                "where": traceback.format_exc()[-1500:],
            }
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()

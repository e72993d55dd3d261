"""What the tests of trust share: a function to save, and a restore that is looked at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import orbax_aot as oaot
from orbax_aot import executable

WEIGHTS = np.arange(12, dtype=np.float32)
EXPECTED = WEIGHTS * 2 + 1


def live() -> Any:
    """Returns the live function, which is another object each time."""

    @oaot.jit
    def step(w: Any, x: Any) -> Any:
        return w * 2 + x

    return step


def save(item: Path, handler: Any, shift: float = 0.0) -> None:
    """Saves state and function as Orbax does in a commit, without a manager around it."""
    step = live()
    step(jnp.asarray(WEIGHTS), 1.0)
    item.mkdir(parents=True)
    handler.save(item, oaot.AotSave({"w": WEIGHTS + shift}, fns={"step": step}))
    handler.finalize(item)


@dataclasses.dataclass
class Outcome:
    """What came of a restore."""

    verdict: str
    reasons: list[str]
    text: str
    weights: bool
    loads: int
    fns: Any
    state: Any

    def call(self) -> np.ndarray:
        return np.asarray(self.fns["step"](jnp.asarray(WEIGHTS), 1.0))


def restore(item: Path, trust: Any = None, fn: Any = None, **kwargs: Any) -> Outcome:
    """Restores the item, and waits for what it loads."""
    before = executable.counters["loads"]
    handler = oaot.AotHandler(trust=trust, **kwargs)
    state, fns = handler.restore(item, oaot.AotRestore(fns={"step": fn}))
    report = fns.report["step"]
    return Outcome(
        verdict=report.verdict.name,
        reasons=[r.code.name for r in report.reasons],
        text="; ".join(map(str, report.reasons)),
        weights=np.array_equal(jax.tree.map(np.asarray, state)["w"], WEIGHTS),
        loads=executable.counters["loads"] - before,
        fns=fns,
        state=state,
    )

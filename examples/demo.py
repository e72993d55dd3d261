"""Kills a training job and restarts it in several ways; prints what each restart cost.

Every line of the table is a new process that starts from a copy of the same checkpoint, once with
its executables and once without (`ORBAX_AOT=off`: the weights only, functions compile as with
`jax.jit`). The devices are eight that JAX pretends to have on this machine's CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent / "linen"
TRAIN = ["train.py", "--devices=8", "--epochs=3"]
EVALUATE = ["eval.py", "--devices=8"]
KILL_AT_STEP = 60  # in the third epoch; the last checkpoint is that of step 44


class Restart(NamedTuple):
    """One line of the table: how the job is started again, and what ought to come of it."""

    title: str
    command: list[str]
    function: str
    expected: str
    without: bool = True  # also restart without executables, to compare


RESTARTS = [
    Restart(
        "same 4 devices",
        [*TRAIN, "--mesh=data=2,model=2"],
        "train_step",
        "LOADED",
    ),
    Restart(
        "devices 4-7, not 0-3",
        [*TRAIN, "--mesh=data=2,model=2", "--first-device=4"],
        "train_step",
        "REMAPPED",
    ),
    Restart(
        "2 devices, not 4",
        [*TRAIN, "--mesh=data=2,model=1"],
        "train_step",
        "RECOMPILED",
    ),
    # Without executables there is nothing to evaluate with: eval.py has no model.
    Restart("eval.py, no model code", EVALUATE, "predict", "LOADED", without=False),
]


class Run(NamedTuple):
    """What a process printed, how it ended, and the seconds from its start to its first result."""

    output: str
    exit_code: int
    secs: float

    def find(self, pattern: str) -> str:
        """Returns the group of `pattern` where the output has it last."""
        found = re.findall(pattern, self.output)
        if not found:
            sys.exit(f"demo: {pattern!r} is not in the output of a run:\n\n{self.output}")
        return found[-1]


def run(command: list[str], checkpoints: Path, *, aot: bool = True, exit_code: int = 0) -> Run:
    """Runs one of the examples in a new process, which must end with `exit_code`."""
    script, *options = command
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    # Neither the caller's settings nor what JAX's own cache holds may change what is measured.
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "ORBAX_AOT"):
        environment.pop(name, None)
    if not aot:
        environment["ORBAX_AOT"] = "off"
    secs, lines = float("nan"), []
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-u", EXAMPLES / script, f"--checkpoints={checkpoints}", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "first step done" in line or (script == "eval.py" and "test accuracy" in line):
                secs = time.perf_counter() - start
    finished = Run("".join(lines), process.returncode, secs)
    if finished.exit_code != exit_code:
        sys.exit(f"demo: {script} ended with {finished.exit_code}:\n\n{finished.output}")
    return finished


def main() -> None:
    console = Console(width=100)
    table = Table(
        "restart", "verdict", "reason", "with", "without", "accuracy", box=box.SIMPLE_HEAD
    )
    surprises = []
    with tempfile.TemporaryDirectory(prefix="orbax-aot-demo-") as folder:
        saved = Path(folder, "saved")
        console.print("Training on a 2x2 mesh of devices 0-3, to be killed ...")
        command = [*TRAIN, "--mesh=data=2,model=2", f"--kill-at-step={KILL_AT_STEP}"]
        killed = run(command, saved, exit_code=-signal.SIGKILL)
        console.print(f"First step after {killed.secs:.1f} s; killed at step {KILL_AT_STEP}.")

        for i, restart in enumerate(RESTARTS):
            console.print(f"Restarting: {restart.title} ...")
            copy = shutil.copytree(saved, Path(folder, f"with-{i}"))
            with_aot = run(restart.command, copy)
            verdict = with_aot.find(rf"{restart.function} +([A-Z]+)")
            reason = with_aot.find(rf"{restart.function} +[A-Z]+[ \d.]+([A-Z_]{{3,}}|)")
            without = "-"
            if restart.without:
                copy = shutil.copytree(saved, Path(folder, f"without-{i}"))
                plain = run(restart.command, copy, aot=False)
                without = f"{plain.secs:.1f} s"
                if plain.find(r"(loss .*)") != with_aot.find(r"(loss .*)"):
                    surprises.append(f"{restart.title}: the losses with and without differ")
            if verdict != restart.expected:
                surprises.append(f"{restart.title}: {verdict}, not {restart.expected}")
            accuracy = with_aot.find(r"test accuracy ([\d.]+)")
            secs = f"{with_aot.secs:.1f} s"
            table.add_row(restart.title, verdict, reason or "-", secs, without, accuracy)

    console.print(table)
    console.print("with, without: from the start of the process to its first step or result.")
    if surprises:
        sys.exit("demo: not as expected:\n" + "\n".join(surprises))
    console.print("Each restarted training reached the same loss with and without, bit for bit.")


if __name__ == "__main__":
    main()

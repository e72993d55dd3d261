"""Kills a training job and restarts it in several ways; prints what each restart cost.

Every line of the table is a new process that starts from a copy of the same checkpoint, once with
its executables and once without (`ORBAX_AOT=off`: the weights only, functions compile as with
`jax.jit`). The devices are eight that JAX pretends to have on this machine's CPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent / "linen"
SAVED_ON = ["--devices=8", "--mesh=data=2,model=2"]
FIRST_RESULT = {"train.py": "first step done", "eval.py": "test accuracy"}


@dataclasses.dataclass(frozen=True)
class Restart:
    """One line of the table: how the job is started again, and what ought to come of it."""

    title: str
    script: str
    options: list[str]
    function: str
    expected: str


RESTARTS = [
    Restart("train, same 4 devices", "train.py", SAVED_ON, "train_step", "LOADED"),
    Restart(
        "train, devices 4-7 instead of 0-3",
        "train.py",
        [*SAVED_ON, "--first-device=4"],
        "train_step",
        "REMAPPED",
    ),
    Restart(
        "train, 2 devices instead of 4",
        "train.py",
        ["--devices=8", "--mesh=data=2,model=1"],
        "train_step",
        "RECOMPILED",
    ),
    Restart("evaluate, no model code", "eval.py", ["--devices=8"], "predict", "LOADED"),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a finished process printed, and the seconds from its start to its first result."""

    output: str
    first_result_secs: float
    exit_code: int

    def find(self, pattern: str) -> str:
        """Returns the group of `pattern` where the output has it last."""
        found = re.findall(pattern, self.output)
        if not found:
            sys.exit(f"demo: no {pattern!r} in the output of a run:\n\n{self.output}")
        return found[-1]


def run(script: str, checkpoints: Path, *options: str, aot: bool = True) -> Run:
    command = [sys.executable, "-u", EXAMPLES / script, f"--checkpoints={checkpoints}", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    if not aot:
        environment["ORBAX_AOT"] = "off"
    start, first_result_secs, lines = time.perf_counter(), float("nan"), []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if FIRST_RESULT[script] in line and first_result_secs != first_result_secs:
                first_result_secs = time.perf_counter() - start
    return Run("".join(lines), first_result_secs, process.returncode)


def require_success(run: Run) -> Run:
    if run.exit_code != 0:
        sys.exit(f"demo: a run ended with exit code {run.exit_code}:\n\n{run.output}")
    return run


def main() -> None:
    console = Console()
    table = Table("restart", "verdict", "reason", "s", "s without", "accuracy")
    surprises = []
    with tempfile.TemporaryDirectory(prefix="orbax-aot-demo-") as folder:
        saved = Path(folder, "saved")
        console.print("Training on a 2x2 mesh of devices 0-3, killed in the third epoch ...")
        killed = run("train.py", saved, *SAVED_ON, "--kill-at-step=60")
        if killed.exit_code != -signal.SIGKILL:
            sys.exit(f"demo: the training ended before it was killed:\n\n{killed.output}")
        console.print(f"first step after {killed.first_result_secs:.1f} s; killed at step 60")

        for i, restart in enumerate(RESTARTS):
            console.print(f"Restarting: {restart.title} ...")
            runs = []
            for aot in (True, False):
                if restart.script == "eval.py" and not aot:
                    continue  # without the package there is no program to evaluate with
                copy = shutil.copytree(saved, Path(folder, f"restart-{i}-{aot}"))
                epochs = ["--epochs=3"] if restart.script == "train.py" else []
                finished = run(restart.script, copy, *restart.options, *epochs, aot=aot)
                runs.append(require_success(finished))
            with_aot = runs[0]
            verdict = with_aot.find(rf"{restart.function}\W+([A-Z]+)")
            reason = with_aot.find(rf"{restart.function}\W+[A-Z]+\W+([A-Z]+_[A-Z_]+|)")
            accuracy = with_aot.find(r"test accuracy ([\d.]+)")
            table.add_row(
                restart.title,
                verdict,
                reason or "-",
                f"{with_aot.first_result_secs:.1f}",
                f"{runs[1].first_result_secs:.1f}" if runs[1:] else "not possible",
                accuracy,
            )
            if verdict != restart.expected:
                surprises.append(f"{restart.title}: {verdict}, not {restart.expected}")
            if runs[1:] and runs[1].find(r"(loss .*)") != with_aot.find(r"(loss .*)"):
                surprises.append(f"{restart.title}: the losses with and without differ")

    console.print(table)
    console.print("s: seconds from the start of the process to its first result.")
    if surprises:
        sys.exit("demo: not as expected:\n" + "\n".join(surprises))
    console.print("Each restart went on to the same loss, bit for bit, with and without.")


if __name__ == "__main__":
    main()

"""The examples in short form: trained, restarted in a new process, and used without their source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# example: the script that uses a checkpoint without source, and the last line it prints
USES = {
    "gpt": ("sample.py", r"step 4: The import statement[\x00-\x7f]+"),
    "vision_nnx": ("eval.py", r"step 4: accuracy 0\.\d{4}"),
    "diffusion": (
        "sample.py",
        r"step 4: drew \[0, 1, 2, 3, 4, 5, 6, 7\], mean brightness 0\.\d{4}",
    ),
}

pytestmark = pytest.mark.xdist_group("examples")


def run(script: Path, *options: object) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "ORBAX_AOT"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "200"}
    command = [sys.executable, script, *map(str, options)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


def verdicts(output: str) -> dict[str, str]:
    names = "train_step|sample|predict|denoise|decode"
    return dict(re.findall(rf"^ ?({names}) +([A-Z]+) ", output, re.MULTILINE))


@pytest.mark.parametrize("example", USES)
def test_a_restarted_example_compiles_nothing_and_goes_on_bit_for_bit(example, tmp_path):
    train, straight, restarted = EXAMPLES / example / "train.py", tmp_path / "a", tmp_path / "b"
    options = ("--steps", 4, "--save-every", 2)
    whole = run(train, "--checkpoints", straight, *options)
    shutil.copytree(straight, restarted)
    shutil.rmtree(restarted / "4")
    rest = run(train, "--checkpoints", restarted, *options)
    assert set(verdicts(rest).values()) == {"LOADED"} and len(verdicts(rest)) >= 2
    assert "step 2" not in rest
    assert re.findall("step 4: loss .*", rest) == re.findall("step 4: loss .*", whole) != []

    script, last = USES[example]
    used = run(EXAMPLES / example / script, "--checkpoints", restarted)
    assert set(verdicts(used).values()) == {"LOADED"}
    assert re.search(rf"^{last}\Z", used.rstrip("\n"), re.MULTILINE)

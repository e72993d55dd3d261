"""Each file of the corpus is an attack: it earns one reason, reaches no native code, and costs no weights."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
pytestmark = pytest.mark.xdist_group("attacks")  # one process makes the outcomes
_ATTACKS = sorted((_HERE / "corpus").glob("*.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each attack, by name; all are restored in one other process, which they may end."""
    command = [sys.executable, str(_HERE / "attack_child.py")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, done.stderr[-3000:]
    return {outcome["name"]: outcome for outcome in found}


def test_the_checkpoint_loads_before_it_is_attacked(outcomes: dict[str, Any]) -> None:
    assert outcomes[""]["verdict"] == "LOADED"
    assert outcomes[""]["loads"] == 1
    assert outcomes[""]["weights"]


@pytest.mark.parametrize("path", _ATTACKS, ids=lambda p: p.stem)
def test_attack_earns_its_reason_and_costs_no_weights(path: Path, outcomes: dict[str, Any]) -> None:
    assert path.stem in outcomes, "the process ended before or during this attack"
    outcome = outcomes[path.stem]
    expected = next(
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "REASON"  # type: ignore[attr-defined]
    )
    assert {*outcome["reasons"]} == {expected}, outcome["text"]
    assert outcome["loads"] == 0, "native code was reached"
    assert outcome["weights"], "the weights were lost"
    assert outcome["secs"] < 30


@pytest.mark.parametrize("path", _ATTACKS, ids=lambda p: p.stem)
def test_attack_says_in_one_line_what_it_tries(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert doc.endswith(".") and "\n" not in doc

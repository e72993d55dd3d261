"""Programs that call Python, restored with other callbacks than they were saved with: no process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support_run import HERE, ROOT


def run(task, folder):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(HERE)))
    return subprocess.run(
        [sys.executable, HERE / "callbacks_child.py", task, folder],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks") / "item"
    for task in ("save", "restore"):
        child = run(task, folder)
        assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_every_result_is_that_of_the_live_function(found):
    assert {name: right for name, (right, _) in found.items() if not right} == {}


@pytest.mark.parametrize("verify", ["code", "program", "signature"])
def test_only_the_same_program_is_loaded(found, verify):
    """Callbacks with other bodies leave the program the same, and it runs the live ones."""
    prefix = f"f {verify} "
    verdicts = {n.removeprefix(prefix): v for n, (_, v) in found.items() if n.startswith(prefix)}
    assert verdicts == {
        "saved": "LOADED",
        "other_bodies": "LOADED",
        "fewer": "RECOMPILED",
        "more": "RECOMPILED",
        "none_at_all": "RECOMPILED",
        "larger_between": "RECOMPILED",
        "other_type_between": "RECOMPILED",
    }


def test_without_its_program_digest_a_program_with_callbacks_is_never_loaded(found):
    assert {v for n, (_, v) in found.items() if n.startswith("bare ")} == {"RECOMPILED"}

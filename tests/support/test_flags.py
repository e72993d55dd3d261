"""XLA's flags and the user's own kernels, between a saving process and a restoring one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support_run import HERE, ROOT

pytestmark = pytest.mark.xdist_group("support_flags")


def run(task, folder, flags="") -> dict:
    """Runs a task in a new process, which must end well; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))), "XLA_FLAGS": flags}
    child = subprocess.run(
        [sys.executable, HERE / "flags_child.py", task, folder],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1]) if child.stdout else {}


def verdicts(result) -> dict:
    return {name: report["verdict"] for name, report in result["report"].items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    dump = folder / "dumped_at_save"
    run("save", folder / "item", f"--xla_dump_to={dump} --xla_dump_hlo_as_text")
    assert any("multiply" in file.name for file in dump.iterdir())
    return folder


def test_dump_flags_in_effect_at_the_save_never_reach_the_load(saved):
    dump = saved / "dumped_at_save"
    shutil.rmtree(dump)
    result = run("restore", saved / "item")
    assert verdicts(result) == {"multiply": "LOADED", "factor": "LOADED"}
    assert not dump.exists()


def test_dump_flags_at_the_load_do_not_matter(saved):
    result = run("restore", saved / "item", f"--xla_dump_to={saved / 'dumped_at_load'}")
    assert verdicts(result) == {"multiply": "LOADED", "factor": "LOADED"}


def test_another_flag_is_a_reason(saved):
    result = run("restore", saved / "item", "--xla_cpu_enable_fast_math=true")
    reasons = result["report"]["multiply"]["reasons"]
    assert [(r["code"], r["saved"], r["current"]) for r in reasons] == [
        ("XLA_FLAGS", "xla_cpu_enable_fast_math=unset", "xla_cpu_enable_fast_math=true")
    ]


def test_a_kernel_of_the_users_runs_where_it_is_registered(saved):
    result = run("restore", saved / "item")
    assert isinstance(result["found"]["factor"], list)


def test_a_kernel_that_is_not_registered_is_a_reason_and_ends_no_process(saved):
    result = run("unregistered", saved / "item")
    assert isinstance(result["found"]["multiply"], list)
    report = result["report"]["factor"]
    assert report["verdict"] == "REFUSED"
    assert report["reasons"][0]["code"] == "LOAD_FAILED"
    assert "orbax_aot_test_qr" in report["reasons"][0]["saved"]
    assert result["found"]["factor"].startswith(
        "IncompatibleExecutableError: factor: cannot be called here: LOAD_FAILED: "
    )


def test_with_the_live_function_a_missing_kernel_fails_as_in_jax_jit(saved):
    result = run("unregistered_live", saved / "item")
    assert isinstance(result["found"]["multiply"], list)
    assert "orbax_aot_test_qr" in result["found"]["factor"]
    assert "IncompatibleExecutableError" not in result["found"]["factor"]

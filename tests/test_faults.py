"""Whatever fails in this package, the weights are saved, restored and equal."""

from __future__ import annotations

import fault_cases as cases
import pytest
from processes import Child


@pytest.fixture(scope="module")
def child():
    with Child(devices=2, timeout_secs=600) as child:
        yield child


def test_each_function_called_in_a_save_may_fail_and_the_step_commits_with_equal_weights(
    child, tmp_path
):
    found = child.run(cases.faults_of_save, tmp_path)
    assert found["problems"] == []
    for name in (
        "saving._snapshot_of",
        "saving.Saving.run",
        "store.Store.write",
        "manifest.encode",
    ):
        assert f"orbax_aot.{name}" in found["called"]
    assert len(found["called"]) > 80


@pytest.mark.parametrize("how", ["live", "no source"])
def test_each_function_called_in_a_restore_may_fail_and_the_weights_come_back_equal(
    child, tmp_path, how
):
    found = child.run(cases.faults_of_restore, tmp_path, how)
    assert found["problems"] == []
    for name in ("plan.decide", "manifest.decode", "signatures.RestoredSignature._load"):
        assert f"orbax_aot.{name}" in found["called"]
    assert len(found["called"]) > 80


def test_the_injection_is_seen_where_nothing_guards_against_it(tmp_path):
    """The test's own tool works: an exempt function that fails does lose the step."""
    with Child(devices=2) as child:
        name = "orbax_aot.handler.AotHandler._wrapped_save"
        assert child.run(cases.loses_the_step, tmp_path, name)
        child.kill()  # Orbax waits at exit for a save that never came

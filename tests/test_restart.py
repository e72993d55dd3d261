"""Saved in one process, restored in others: on the same, on other and on too many or too few devices."""

from __future__ import annotations

import pytest
import restart_cases as cases
from processes import Child

STEPS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def trained(path):
    """A training on devices 0-3 of 8, saved after 3 steps; what it computed before and after that."""
    with Child() as child:
        return child.run(cases.train_save_and_go_on, path, [0, 1, 2, 3], STEPS)


@pytest.fixture(scope="module")
def remapped(path, trained):
    """What a second process, which has never compiled the functions, computed on other devices."""
    with Child() as child:
        found = {}
        for name, case in REMAPS.items():
            found[name] = child.run(cases.resume, path, **case)
        return found


REMAPS = {
    "4-7 by mesh": dict(ids=[4, 5, 6, 7], more=STEPS),
    "4-7 by mesh, without source": dict(ids=[4, 5, 6, 7], live=False),
    "7-4 by mesh": dict(ids=[7, 6, 5, 4]),
    "permuted by mesh": dict(ids=[6, 1, 4, 3]),
    "permuted by mesh, without source": dict(ids=[6, 1, 4, 3], live=False),
    "4-7 by devices": dict(ids=[4, 5, 6, 7], by="devices"),
    "7-4 by devices, without source": dict(ids=[7, 6, 5, 4], by="devices", live=False),
    "permuted by the target": dict(ids=[2, 5, 0, 7], by="target"),
    "4-7 by the target, without source": dict(ids=[4, 5, 6, 7], by="target", live=False),
    "signature": dict(ids=[4, 5, 6, 7], verify="signature"),
}


@pytest.mark.parametrize("name", REMAPS)
def test_on_other_devices_the_saved_executables_run_without_any_tracing(trained, remapped, name):
    found = remapped[name]
    assert found["train_step"]["verdict"] == found["predict"]["verdict"] == "REMAPPED"
    assert found["train_step"]["codes"] == found["predict"]["codes"] == []
    assert found["work"] == []
    assert found["events"] == [
        "/jax/orbax_aot/restore/load_secs",
        "/jax/orbax_aot/restore/remapped",
    ]
    assert found["tracebacks"] == []
    lines = sorted(found["lines"])
    assert [line.partition(" in ")[0] for line in lines] == [
        "INFO predict: remapped",
        "INFO train_step: remapped",
    ]


@pytest.mark.parametrize("name", REMAPS)
def test_on_other_devices_the_results_are_bit_equal(trained, remapped, name):
    found = remapped[name]
    assert found["placed"]
    assert found["saved"] == trained["saved"]
    assert found["logits"] == trained["logits"]
    assert found["losses"] == trained["losses"][: len(found["losses"])]


def test_resuming_gives_the_losses_of_the_run_that_was_not_interrupted(path, trained):
    with Child() as child:
        found = child.run(cases.resume, path, [0, 1, 2, 3], STEPS, by="default")
    assert found["train_step"]["verdict"] == found["predict"]["verdict"] == "LOADED"
    assert found["work"] == []
    assert len(found["losses"]) == STEPS
    assert found["losses"] == trained["losses"]
    assert found["last"] == trained["last"]


def test_resuming_on_other_devices_gives_the_losses_of_the_run_that_was_not_interrupted(
    trained, remapped
):
    found = remapped["4-7 by mesh"]
    assert len(found["losses"]) == STEPS
    assert (found["losses"], found["last"]) == (trained["losses"], trained["last"])


# How many devices the restoring process has, what it asks for, and the reason it gets.
OTHER_COUNTS = {
    "8 by mesh": (8, dict(ids=list(range(8)), shape=(2, 4)), "DEVICE_COUNT"),
    "8 by devices": (
        8,
        dict(ids=list(range(8)), shape=(2, 4), by="devices+target"),
        "DEVICE_COUNT",
    ),
    "4x1 by mesh": (8, dict(ids=[0, 1, 2, 3], shape=(4, 1)), "MESH_SHAPE"),
    "4 on one axis by the target": (
        8,
        dict(ids=[0, 1, 2, 3], shape=(4,), by="target"),
        "MESH_SHAPE",
    ),
    "2 by mesh": (2, dict(ids=[0, 1], shape=(1, 2)), "DEVICE_COUNT"),
    "2 by the target": (2, dict(ids=[0, 1], shape=(2, 1), by="target"), "DEVICE_COUNT"),
    "1 by mesh": (1, dict(ids=[0], shape=(1, 1)), "DEVICE_COUNT"),
    "1 by devices": (1, dict(ids=[0], shape=(1, 1), by="devices"), "DEVICE_COUNT"),
    "1 by default": (1, dict(ids=[0], shape=(1, 1), by="default"), "DEVICE_COUNT"),
}


@pytest.fixture(scope="module")
def recompiled(path, trained):
    found = {}
    for count in (8, 2, 1):
        with Child(devices=count) as child:
            for name, (devices, case, _) in OTHER_COUNTS.items():
                if devices == count:
                    found[name] = child.run(cases.resume, path, **case)
    return found


@pytest.mark.parametrize("name", OTHER_COUNTS)
def test_on_another_count_of_devices_the_live_function_is_compiled_and_right(
    trained, recompiled, name
):
    found = recompiled[name]
    (_, _, code) = OTHER_COUNTS[name]
    for function in ("train_step", "predict"):
        assert found[function]["verdict"] == "RECOMPILED"
        assert found[function]["codes"] == [code]
    assert found["saved"] == trained["saved"]
    values = lambda losses: [float.fromhex(x) for x in losses]
    assert values(found["losses"]) == pytest.approx(values(trained["losses"][:4]), rel=1e-4)


@pytest.mark.parametrize("name", OTHER_COUNTS)
def test_on_another_count_of_devices_each_function_says_why_in_one_line(recompiled, name):
    found = recompiled[name]
    (_, _, code) = OTHER_COUNTS[name]
    assert found["tracebacks"] == []
    lines = sorted(found["lines"])
    assert len(lines) == 2, lines
    for line, function in zip(lines, ("predict", "train_step"), strict=True):
        assert line.startswith(f"INFO {function}: recompiled in "), line
        assert f" s ({code}: saved " in line, line
    assert found["events"] == ["/jax/orbax_aot/restore/recompiled"]

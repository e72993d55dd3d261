"""Rebuilt functions, saved with the next step: the second start on that mesh loads, and the old ones still do."""

from __future__ import annotations

import shutil

import pytest
from stored import signatures_of

BOTH = ("train_step", "predict")
REVERSED = [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.fixture
def path(trained, tmp_path):
    """A copy of the MLP's checkpoint: step 3, saved from a (2, 4) mesh."""
    shutil.copytree(trained[0] / "mlp", tmp_path / "mlp")
    return tmp_path / "mlp"


def verdicts(found):
    assert found["tracebacks"] == []
    return {found["predict"]["verdict"], found["train_step"]["verdict"]}


def places(path, step):
    """How many devices each variant of each function is for."""
    return {
        name: sorted(v.topology.count for v in signatures_of(path, name, step)[0].variants)
        for name in BOTH
    }


@pytest.mark.parametrize("keep", [None, 1], ids=["all steps kept", "only the last step kept"])
def test_each_mesh_is_rebuilt_once_and_loaded_from_then_on(path, trained, start, keep):
    run = lambda child, shape, step=None, **options: child.run(
        "serve_cases:serve_and_save",
        path,
        shape,
        [(step, BOTH)] if step else [],
        keep=keep,
        **options,
    )
    portable = {name: signatures_of(path, name, 3)[0].portable for name in BOTH}
    first = start()
    original = run(first, (2, 4))
    rebuilt = {(2, 2): run(first, (2, 2), step=4)}
    assert verdicts(original) == {"LOADED"}
    assert verdicts(rebuilt[2, 2]) == {"REBUILT"}
    assert places(path, 4) == {name: [4, 8] for name in BOTH}
    second = start()
    again = {(2, 2): run(second, (2, 2))}
    assert run(second, (2, 4))["logits"] == original["logits"]
    rebuilt[4, 2] = run(second, (4, 2), step=5)
    assert verdicts(rebuilt[4, 2]) == {"REBUILT"}
    # Saved from where it is loaded: what it was rebuilt for stays too.
    assert verdicts(run(second, (2, 4), step=6)) == {"LOADED"}
    third = start()
    again[4, 2] = run(third, (4, 2))
    rebuilt[1, 1] = run(third, (1, 1), step=7)
    last = start()
    again[1, 1] = run(last, (1, 1))
    for shape, found in again.items():
        assert verdicts(found) == {"LOADED"}
        assert (found["logits"], found["loss"]) == (
            rebuilt[shape]["logits"],
            rebuilt[shape]["loss"],
        )
    for shape, order, verdict in (
        ((2, 4), None, "LOADED"),
        ((2, 4), REVERSED, "REMAPPED"),
        ((2, 2), None, "LOADED"),
        ((2, 2), [4, 5, 6, 7], "REMAPPED"),
        ((4, 2), None, "LOADED"),
        ((4, 2), REVERSED, "REMAPPED"),
        ((1, 1), None, "LOADED"),
    ):
        found = run(last, shape, order=order)
        assert verdicts(found) == {verdict}
        expected = original if shape == (2, 4) else rebuilt[shape]
        assert (found["logits"], found["loss"]) == (expected["logits"], expected["loss"])
    assert places(path, 7) == {name: [1, 4, 8, 8] for name in BOTH}
    assert {name: signatures_of(path, name, 7)[0].portable for name in BOTH} == portable
    assert found["steps"] == ([7] if keep else [3, 4, 5, 6, 7])


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)], ids=["rebuilt", "loaded"])
def test_what_a_deleted_step_held_is_saved_all_the_same(path, start, shape):
    """The step they came from is gone when the functions are saved for the first time."""
    first = start()
    first.run("serve_cases:serve_and_save", path, (2, 2), [(4, BOTH)], keep=1)
    steps = [(5, None), (6, BOTH)]
    assert first.run("serve_cases:serve_and_save", path, shape, steps, keep=1)["steps"] == [6]
    assert places(path, 6) == {name: [4, 8] for name in BOTH}
    assert all(signatures_of(path, name, 6)[0].portable is not None for name in BOTH)
    second = start()
    for other in ((2, 2), (2, 4)):
        found = second.run("serve_cases:serve_and_save", path, other)
        assert verdicts(found) == {"LOADED"}
    assert verdicts(second.run("serve_cases:serve_and_save", path, (4, 2))) == {"REBUILT"}


def test_a_variant_is_saved_once_however_often_it_is_saved(path, start):
    child = start()
    for steps in (4, 5), (6, 7):
        child.run("serve_cases:serve_and_save", path, (2, 2), [(step, BOTH) for step in steps])
        for step in steps:
            assert places(path, step) == {name: [4, 8] for name in BOTH}

"""Trees of all kinds are bound by key path: a Flax TrainState, an nnx State, plain dictionaries."""

from __future__ import annotations

import pytest
import special_cases as cases
from processes import Child


@pytest.fixture(scope="module")
def linen(tmp_path_factory):
    path = tmp_path_factory.mktemp("linen")
    with Child(devices=1) as child:
        return path, child.run(cases.save_linen, path)


@pytest.fixture(scope="module")
def nnx(tmp_path_factory):
    path = tmp_path_factory.mktemp("nnx")
    with Child(devices=1) as child:
        return path, child.run(cases.save_nnx, path)


@pytest.mark.parametrize("abstract_step", [False, True])
def test_a_train_state_resumes_bit_equal_and_keeps_its_type_and_its_weak_step(linen, abstract_step):
    path, saved = linen
    with Child(devices=1) as child:
        found = child.run(cases.resume_linen, path, abstract_step=abstract_step)
    assert found["weak"] and found["type"] == "TrainState"
    assert found["report"] == ["LOADED", []]
    assert (found["losses"], found["last"]) == (saved["losses"], saved["last"])
    assert found["work"] == []


def test_a_sharded_train_state_resumes_bit_equal_on_other_devices(tmp_path):
    with Child() as child:
        saved = child.run(cases.save_linen, tmp_path, True)
    with Child() as child:
        found = child.run(cases.resume_linen, tmp_path, [7, 4, 5, 6])
    assert found["report"] == ["REMAPPED", []]
    assert (found["losses"], found["last"]) == (saved["losses"], saved["last"])
    assert found["work"] == []


def test_a_train_state_saved_can_be_trained_as_plain_dictionaries_without_source(linen):
    path, saved = linen
    with Child(devices=1) as child:
        found = child.run(cases.resume_linen_without_source, path)
    assert found["report"] == ["LOADED", []]
    assert found["losses"] == saved["losses"]
    assert found["types"] == ["dict", "dict", "dict"]
    assert found["keys"] == ["opt_state", "params", "step"]
    assert found["logits"] == [4, 4]


@pytest.mark.parametrize("as_plain", [False, True])
def test_an_nnx_state_resumes_bit_equal(nnx, as_plain):
    path, saved = nnx
    with Child(devices=1) as child:
        found = child.run(cases.resume_nnx, path, as_plain)
    assert found["report"] == ["LOADED", []]
    assert found["losses"] == saved["losses"]
    assert found["type"] == ("dict" if as_plain else "State")
    assert found["work"] == []
    if not as_plain:
        assert found["last"] == saved["last"]

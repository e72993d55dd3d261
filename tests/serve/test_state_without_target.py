"""A state restored with no target lies where the functions expect it on the mesh of this job."""

from __future__ import annotations

import numpy as np
import pytest


def at(spec, shape):
    mesh = dict(zip(("data", "model"), shape, strict=True))
    return {"spec": list(spec), "mesh": mesh, "devices": list(range(shape[0] * shape[1]))}


@pytest.fixture(scope="module")
def saved(trainer, tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
    return root, trainer.run("state_training:save_all", root)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2), (1, 2), (1, 1)], ids=str)
def test_it_is_sharded_over_the_mesh_that_is_asked_for(saved, server, shape):
    found = server.run("serve_cases:place_state", saved[0] / "whole", shape)
    assert found["at"] == {
        "w": at(["data", "model"], shape),
        "b": at(["model"], shape),
        "s": at([], shape),
    }
    assert found["functions"] == {"f": "LOADED" if shape == (2, 4) else "REBUILT"}
    assert found["tracebacks"] == []


def test_with_no_mesh_it_lies_on_a_mesh_as_it_was_saved(saved, server):
    found = server.run("serve_cases:place_state", saved[0] / "whole")
    assert found["at"]["w"] == at(["data", "model"], (2, 4))


def test_a_list_of_devices_stands_for_the_mesh_it_was_saved_on(saved, server):
    found = server.run("serve_cases:place_state", saved[0] / "whole", (2, 4), by="devices")
    assert found["at"]["w"] == at(["data", "model"], (2, 4))
    assert found["functions"] == {"f": "LOADED"}


def test_where_the_saved_mesh_does_not_exist_and_none_is_asked_for_it_lies_on_one_device(
    saved, lone_server, start
):
    for child in (lone_server, start(devices=4)):
        found = child.run("serve_cases:place_state", saved[0] / "whole")
        assert {tuple(place["devices"]) for place in found["at"].values()} == {(0,)}
        assert found["functions"] == {"f": "REBUILT"}


def test_what_the_function_wants_goes_before_how_it_was_saved(saved, server):
    for shape in ((2, 4), (2, 2)):
        found = server.run("serve_cases:place_state", saved[0] / "part", shape)["at"]
        assert found["params/w"] == at([None, "model"], shape)
        assert found["params/b"] == at(["model"], shape)
        assert found["rest"] == at(["data", "model"], shape)
        assert found["step"] == at([], shape)


def test_without_functions_it_lies_as_it_was_saved(saved, server):
    for shape in ((2, 4), (2, 2)):
        found = server.run("serve_cases:place_state", saved[0] / "part", shape, names=[])
        assert found["at"]["params/w"] == at(["data", "model"], shape)
        assert found["functions"] == {}


def test_a_dimension_that_does_not_divide_is_left_whole(saved, server):
    found = server.run("serve_cases:place_state", saved[0] / "unused", (1, 8))["at"]
    assert found["odd"] == at(["data", None], (1, 8))
    assert found["w"] == at(["data", "model"], (1, 8))


@pytest.mark.parametrize(
    ("shape", "verdict"), [((2, 4), "LOADED"), ((2, 2), "REBUILT"), ((1, 1), "REBUILT")]
)
def test_numpy_arrays_plain_values_and_keys_come_back_as_they_were(saved, server, shape, verdict):
    root, expected = saved
    found = server.run("serve_cases:read_mixed", root / "mixed", shape)
    assert found["kinds"] == {
        "w": "ArrayImpl",
        "numpy": "ndarray",
        "int": "int",
        "float": "float",
        "key": "PRNGKeyArray",
        "weak": "ArrayImpl",
        "none": "NoneType",
        "list": "list",
    }
    assert found["plain"] == [5, 0.25, None, 9, 3]
    assert found["numpy"] == [0.0, 1.0, 2.0]
    assert found["key"] == expected["key"]
    assert found["weak"] == [True, 2.5]
    assert found["verdict"] == verdict
    np.testing.assert_allclose(found["noisy"], expected["noisy"], rtol=1e-6, atol=1e-6)
    assert found["at"] == {
        "w": at(["data", "model"], shape),
        "key": at([], shape),
        "b": at(["model"], shape),
    }

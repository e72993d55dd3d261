"""Models trained on a (2, 4) mesh, served without their source on that mesh, on others, and on one device."""

from __future__ import annotations

import numpy as np
import pytest
from processes import CaseFailed

MODELS = ("language", "nnx", "mlp")
NO_MESH = "no mesh given"
REVERSED = "(2, 4), devices reversed"
SHAPES = {
    NO_MESH: None,
    "(2, 4)": (2, 4),
    REVERSED: (2, 4),
    "(4, 2)": (4, 2),
    "(2, 2)": (2, 2),
    "(1, 2)": (1, 2),
    "(1, 1)": (1, 1),
}
VERDICTS = {
    NO_MESH: ("LOADED", []),
    "(2, 4)": ("LOADED", []),
    REVERSED: ("REMAPPED", []),
    "(4, 2)": ("REBUILT", ["MESH_SHAPE: saved data=2xmodel=4, here data=4xmodel=2"]),
    "(2, 2)": ("REBUILT", ["DEVICE_COUNT: saved for 8 devices, here 4 devices"]),
    "(1, 2)": ("REBUILT", ["DEVICE_COUNT: saved for 8 devices, here 2 devices"]),
    "(1, 1)": ("REBUILT", ["DEVICE_COUNT: saved for 8 devices, here 1 device"]),
}
BIT_EQUAL = {NO_MESH, "(2, 4)", REVERSED}
PROGRAMS = {"language_step", "language", "classify", "mlp", "mlp_step"}

# Results that the saved program left to the compiler lie where XLA chooses.
_SPECS = {
    "language": {"params": "Dense_0/kernel", "split": [None, "model"]},
    "nnx": {"params": "inner/kernel/value", "split": [None, "model"]},
    "mlp": {"params": "first/w", "split": [None, "model"]},
}


@pytest.fixture(scope="module")
def served(trained, server):
    """Finds what one model gave on one mesh; each is served once, all in one process that never traced anything."""
    root, _ = trained
    found = {}

    def find(model, place):
        if (model, place) not in found:
            order = [7, 6, 5, 4, 3, 2, 1, 0] if place == REVERSED else None
            found[model, place] = server.run(
                "serve_cases:serve", root / model, model, SHAPES[place], order
            )
        return found[model, place]

    return find


def functions_of(found):
    return [found[name] for name in ("predict", "train_step") if name in found]


@pytest.mark.parametrize(
    "module", ["serve_models", "serve_training", "flax.linen", "flax.nnx", "optax"]
)
def test_the_serving_process_cannot_import_the_source(server, module):
    with pytest.raises(CaseFailed, match="where its functions are served"):
        server.run("serve_cases:try_to_import", module)


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_each_function_is_loaded_on_the_saved_mesh_and_rebuilt_on_others(served, model, place):
    found = served(model, place)
    verdict, reasons = VERDICTS[place]
    for function in functions_of(found):
        assert (function["verdict"], function["reasons"]) == (verdict, reasons)
    assert found["tracebacks"] == []


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_predictions_are_those_of_the_original(trained, served, model, place):
    expected, found = trained[1][model], served(model, place)
    if place in BIT_EQUAL:
        assert found["logits"] == expected["logits"]
    else:
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("model", ["language", "mlp"])
def test_ten_more_steps_give_the_losses_of_the_original_run(trained, served, model, place):
    expected, found = trained[1][model]["losses"], served(model, place)["losses"]
    assert len(found) == 10
    if place in BIT_EQUAL:
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert found[-1] < found[0]


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_state_and_results_are_sharded_over_the_mesh(served, model, place):
    found, shape = served(model, place), SHAPES[place] or (2, 4)
    mesh = {"data": shape[0], "model": shape[1]}
    devices = list(range(shape[0] * shape[1]))
    about = _SPECS[model]
    kernel = found["params_at"][about["params"]]
    assert kernel == {"spec": about["split"], "mesh": mesh, "devices": devices}
    for leaf in (*found["params_at"].values(), *found.get("trained_at", {}).values()):
        assert (leaf["mesh"], leaf["devices"]) == (mesh, devices)
    if "trained_at" in found:
        assert found["trained_at"] == found["params_at"]
    if model == "mlp":
        assert found["logits_at"] == {"spec": ["data"], "mesh": mesh, "devices": devices}
        assert found["hidden_at"] == {"spec": ["data", "model"], "mesh": mesh, "devices": devices}
    assert found["logits_at"]["devices"] == devices


@pytest.mark.parametrize("place", sorted(BIT_EQUAL))
@pytest.mark.parametrize("model", MODELS)
def test_on_the_saved_mesh_nothing_is_traced_or_compiled(served, model, place):
    assert not PROGRAMS & set(served(model, place)["worked_on"])


@pytest.mark.parametrize("model", MODELS)
def test_a_machine_with_one_device_serves_what_eight_trained(trained, lone_server, model):
    root, expected = trained
    found = lone_server.run("serve_cases:serve", root / model, model)
    for function in functions_of(found):
        assert function["verdict"] == "REBUILT"
        assert function["reasons"] == ["DEVICE_COUNT: saved for 8 devices, here 1 device"]
    np.testing.assert_allclose(found["logits"], expected[model]["logits"], rtol=1e-5, atol=1e-5)
    if "losses" in found:
        np.testing.assert_allclose(found["losses"], expected[model]["losses"], rtol=1e-5, atol=1e-5)
    assert {tuple(leaf["devices"]) for leaf in found["params_at"].values()} == {(0,)}
    assert found["tracebacks"] == []


@pytest.mark.parametrize("model", MODELS)
def test_a_machine_with_four_devices_serves_on_one_unless_it_is_told_a_mesh(trained, start, model):
    root, expected = trained
    child = start(devices=4)
    for shape, devices in ((None, {(0,)}), ((2, 2), {(0, 1, 2, 3)})):
        found = child.run("serve_cases:serve", root / model, model, shape)
        assert {f["verdict"] for f in functions_of(found)} == {"REBUILT"}
        assert {tuple(leaf["devices"]) for leaf in found["params_at"].values()} == devices
        np.testing.assert_allclose(found["logits"], expected[model]["logits"], rtol=1e-5, atol=1e-5)

"""An executable runs only for the code it was compiled from, where the live function is passed."""

from __future__ import annotations

import dataclasses

import pytest
import stale_code_cases as cases
from processes import Child

MODEL = '''
import jax.numpy as jnp
import live_helper

SCALE = 2.0
TABLE = {"rate": 0.5}

def train_step(state, batch):
    """Docstring."""
    loss = jnp.sum(state["w"]) * SCALE
    return {"w": live_helper.update(state["w"], batch, TABLE["rate"])}, {"loss": loss}
'''
HELPER = """
import jax.numpy as jnp

BIAS = 1.0

def update(w, batch, rate=0.1):
    return jnp.tanh(w) - rate * batch + BIAS
"""


@dataclasses.dataclass(frozen=True)
class Change:
    model: tuple[str, str] = ("", "")
    helper: tuple[str, str] = ("", "")

    def texts(self) -> tuple[str, str]:
        assert self.model[0] in MODEL and self.helper[0] in HELPER
        return MODEL.replace(*self.model, 1), HELPER.replace(*self.helper, 1)


REAL_CHANGES = {
    "a constant": Change(model=("SCALE = 2.0", "SCALE = 3.0")),
    "an entry of a table": Change(model=('"rate": 0.5', '"rate": 0.25')),
    "the body": Change(model=("jnp.sum(", "jnp.max(")),
    "a helper's body": Change(helper=("jnp.tanh(w)", "jnp.sin(w)")),
    "a helper's constant": Change(helper=("BIAS = 1.0", "BIAS = -1.0")),
    "a helper's operator": Change(helper=("- rate", "+ rate")),
}
HARMLESS = {
    "nothing": Change(),
    "a comment": Change(model=("SCALE = 2.0", "# twice\nSCALE = 2.0")),
    "a docstring": Change(model=("Docstring.", "Another docstring.")),
    "an unused function": Change(helper=("BIAS", "def unused(x):\n    return x\n\nBIAS")),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Saved by one process; restored by another with each change under each way of checking."""
    root = tmp_path_factory.mktemp("stale")
    with Child(devices=1) as child:
        folder = cases_folder(root / "saved", Change())
        saved = child.run(cases.save, root / "checkpoint", folder)
    results = {"saved": saved}
    with Child(devices=1) as child:
        for name, change in {**REAL_CHANGES, **HARMLESS}.items():
            folder = cases_folder(root / name.replace(" ", "_"), change)
            for verify in ("code", "program", "signature"):
                run = child.run(cases.restore, root / "checkpoint", folder, verify)
                results[name, verify] = run
    return results


def cases_folder(folder, change):
    """Writes the user's modules; imports nothing, so that this process needs no jax for them."""
    folder.mkdir(parents=True)
    model, helper = change.texts()
    (folder / "live_model.py").write_text(model)
    (folder / "live_helper.py").write_text(helper)
    return folder


@pytest.mark.parametrize("verify", ["code", "program"])
@pytest.mark.parametrize("name", REAL_CHANGES)
def test_changed_code_never_runs_its_old_executable(found, name, verify):
    run = found[name, verify]
    assert run["right"] != found["saved"], "the change changes nothing: a useless case"
    assert run["result"] == run["right"]
    assert (run["before"], run["verdict"]) == ("PENDING", "RECOMPILED")
    assert "PROGRAM_CHANGED" in run["codes"]
    assert ("CODE_CHANGED" in run["codes"]) == (verify == "code")
    assert run["compiles"] == 1
    (line,) = [line for line in run["lines"] if "recompiled" in line]
    assert line.startswith("INFO train_step: recompiled in ") and run["codes"][0] in line


@pytest.mark.parametrize("name", HARMLESS)
def test_code_that_means_the_same_is_loaded_without_tracing(found, name):
    run = found[name, "code"]
    assert run["result"] == run["right"] == found["saved"]
    assert (run["before"], run["verdict"], run["codes"]) == ("LOADED", "LOADED", [])
    assert (run["traces"], run["compiles"]) == (0, 0)
    assert run["checked_by"] == "code"


@pytest.mark.parametrize("name", HARMLESS)
def test_comparing_programs_traces_the_step_once_and_compiles_nothing(found, name):
    run = found[name, "program"]
    assert run["result"] == run["right"] == found["saved"]
    assert (run["before"], run["verdict"], run["codes"]) == ("PENDING", "LOADED", [])
    assert (run["traces"], run["compiles"]) == (1, 0)
    assert run["checked_by"] == "program"


@pytest.mark.parametrize("name", [*REAL_CHANGES, *HARMLESS])
def test_comparing_signatures_trusts_the_caller(found, name):
    run = found[name, "signature"]
    assert run["result"] == found["saved"]
    assert (run["verdict"], run["traces"], run["compiles"]) == ("LOADED", 0, 0)


@pytest.mark.parametrize("verify", ["code", "program"])
@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_a_constant_changed_between_tracing_and_saving_never_runs_the_old_program(
    tmp_path, scale, verify
):
    """Saved with SCALE = 3 in the module, though 2 was traced; the next start has `scale`."""
    saved_folder = cases_folder(tmp_path / "saved", Change())
    change = Change(model=("SCALE = 2.0", f"SCALE = {scale}"))
    next_folder = cases_folder(tmp_path / "next", change)
    with Child(devices=1) as child:
        saved = child.run(cases.save, tmp_path / "checkpoint", saved_folder, {"SCALE": 3.0})
    with Child(devices=1) as child:
        run = child.run(cases.restore, tmp_path / "checkpoint", next_folder, verify)
    assert run["result"] == run["right"]
    assert (run["result"] == saved) == (scale == 2.0)
    assert run["verdict"] == ("LOADED" if scale == 2.0 else "RECOMPILED")

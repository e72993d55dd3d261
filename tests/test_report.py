"""What people read after a restore, and what `on_mismatch` and `require_loaded` make of it."""

from __future__ import annotations

import json

import altering
import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
import small_checkpoint as made
from watching import watching

import orbax_aot as oaot


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return made.save(tmp_path_factory.mktemp("saved"))


def other_jaxlib(path):
    """Makes all executables of a step unfit here, and leaves no StableHLO."""
    body = altering.alter_variants(
        altering.read_body(path / "1"), ["environment", "jaxlib"], "0.0.1"
    )
    for function in body["functions"].values():
        for signature in function["signatures"]:
            signature["portable"] = None
    altering.write_body(path / "1", body)
    return path


@pytest.fixture
def unfit(tmp_path):
    return other_jaxlib(made.save(tmp_path))


def test_a_loaded_function_is_reported_as_data_as_text_and_as_events(saved):
    with watching() as watched:
        state, fns = made.restore(saved)
        report = fns.report
        found = report["double"]
    assert (found.verdict, found.reasons) == (oaot.Verdict.LOADED, ())
    assert found.signatures == (oaot.Verdict.LOADED,)
    assert found.nbytes > 1000 and 0 < found.seconds < 30
    assert json.loads(json.dumps(report.to_dict()))["double"]["verdict"] == "LOADED"
    assert sorted(report) == ["add", "double"] and len(report) == 2
    lines = str(report).splitlines()
    assert lines[0].split() == ["function", "verdict", "seconds", "kB", "reason"]
    assert [line.split()[:2] for line in lines[2:]] == [["add", "LOADED"], ["double", "LOADED"]]
    events = watched.named("/jax/orbax_aot/restore/loaded")
    assert sorted(about["function"] for _, about in events) == ["add", "double"]
    assert all(about["reason"] == "" for _, about in events)
    durations = watched.named("/jax/orbax_aot/restore/load_secs")
    assert len(durations) == 2 and all(about["secs"] > 0 for _, about in durations)
    assert sorted(line.partition(" in ")[0] for line in watched.lines()) == [
        "INFO add: loaded",
        "INFO double: loaded",
    ]
    fns.require_loaded()
    assert float(fns.double(state["a"])[0]) == 2


def test_functions_are_reached_as_items_and_as_attributes(saved):
    _, fns = made.restore(saved)
    assert fns["double"] is fns.double
    assert dict(fns).keys() == {"add", "double"} and "double" in dir(fns)
    with pytest.raises(
        AttributeError, match="no restored function 'nobody'; there are: add, double"
    ):
        _ = fns.nobody
    with pytest.raises(KeyError):
        fns["nobody"]


def test_a_refused_function_says_why_when_called_and_the_weights_are_there(unfit):
    with watching() as watched:
        state, fns = made.restore(unfit)
        verdicts = {report.verdict for report in fns.report.values()}
    assert verdicts == {oaot.Verdict.REFUSED}
    assert programs.digest(state) == programs.digest(made.STATE)
    with pytest.raises(oaot.IncompatibleExecutableError) as error:
        fns.double(state["a"])
    assert str(error.value).startswith("double: cannot be called here: JAX_VERSION: saved jax ")
    assert "Pass the live function to AotRestore(fns={...})" in str(error.value)
    lines = watched.lines()
    assert len(lines) == 2, lines
    assert all(line.startswith("WARNING ") for line in lines)
    assert all(": refused in 0.00 s (JAX_VERSION: " in line for line in lines)
    with pytest.raises(oaot.IncompatibleExecutableError) as error:
        fns.require_loaded()
    for name in ("add", "double"):
        assert f"{name}: REFUSED" in str(error.value)


def test_raise_raises_before_the_state_is_touched(unfit, monkeypatch):
    touched = []
    restore = ocp.StandardCheckpointHandler.restore
    monkeypatch.setattr(
        ocp.StandardCheckpointHandler,
        "restore",
        lambda *args, **kwargs: touched.append(1) or restore(*args, **kwargs),
    )
    for fns in (None, made.live()):
        with pytest.raises(oaot.IncompatibleExecutableError) as error:
            made.restore(unfit, fns=fns, on_mismatch="raise")
        assert touched == []
        for name in ("add", "double"):
            assert f"\n  {name}: " in str(error.value)
        assert "JAX_VERSION: saved jax" in str(error.value)
        assert "The state was not touched." in str(error.value)
    made.restore(unfit)
    assert touched == [1]


def test_raise_lets_what_fits_through(saved):
    state, fns = made.restore(saved, fns=made.live(), on_mismatch="raise")
    assert fns.report["double"].verdict is oaot.Verdict.LOADED
    assert float(fns.double(state["a"])[0]) == 2


def test_raise_raises_at_the_first_call_of_what_was_pending_before_any_donation(tmp_path):
    step = oaot.jit(lambda s: s * 2, donate_argnums=0)
    step(made.STATE["a"] + 0)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(made.STATE, fns={"step": step}))
    changed = oaot.jit(lambda s: s * 3, donate_argnums=0)
    state, fns = made.restore(tmp_path, fns={"step": changed}, on_mismatch="raise")
    assert fns.report["step"].verdict is oaot.Verdict.PENDING
    with pytest.raises(oaot.IncompatibleExecutableError, match="PROGRAM_CHANGED"):
        changed(state["a"])
    assert not state["a"].is_deleted()


def test_a_call_of_another_signature_compiles_and_is_added_to_the_report(saved):
    state, fns = made.restore(saved, fns=made.live())
    assert float(fns.double(state["a"])[0]) == 2
    before = fns.report["double"]
    with watching() as watched:
        assert fns.double(np.ones(7, np.float32)).shape == (7,)
    after = fns.report["double"]
    assert before.reasons == ()
    assert [r.code for r in after.reasons] == [oaot.ReasonCode.SIGNATURE_CHANGED]
    assert after.seconds > before.seconds
    (line,) = [line for line in watched.lines() if "recompiled" in line]
    assert line.startswith("INFO double: recompiled in ") and "SIGNATURE_CHANGED" in line


def test_without_source_another_signature_is_an_error_by_key_path(saved):
    _, fns = made.restore(saved)
    with pytest.raises(oaot.SignatureError) as error:
        fns.add({"x": np.ones(7, np.float32)}, np.float32(1))
    assert isinstance(error.value, TypeError)
    assert "0/x" in str(error.value) and "[7]" in str(error.value)
    with pytest.raises(oaot.SignatureError, match="0/x"):
        fns.add({"y": made.STATE["a"]}, np.float32(1))
    with pytest.raises(TypeError, match="cannot be transformed"):
        jax.jit(lambda x: fns.double(x))(made.STATE["a"])


def test_a_function_that_was_not_saved_is_compiled_from_the_live_one(saved):
    nobody = oaot.jit(lambda x: x - 1)
    with watching() as watched:
        state, fns = made.restore(saved, fns={"nobody": nobody, "double": made.live()["double"]})
        assert float(fns.nobody(state["a"])[0]) == 0
        assert float(fns.double(state["a"])[0]) == 2
    report = fns.report["nobody"]
    assert report.verdict is oaot.Verdict.RECOMPILED
    assert [r.code for r in report.reasons] == [oaot.ReasonCode.NOT_SAVED]
    assert fns.report["double"].verdict is oaot.Verdict.LOADED
    (line,) = [line for line in watched.lines() if line.startswith("INFO nobody: ")]
    assert "(NOT_SAVED: no function named 'nobody', only ['add', 'double'])" in line


def test_a_name_that_was_not_saved_is_refused(saved):
    state, fns = made.restore(saved, fns=["nobody"])
    assert programs.digest(state) == programs.digest(made.STATE)
    assert fns.report["nobody"].verdict is oaot.Verdict.REFUSED
    with pytest.raises(oaot.IncompatibleExecutableError, match="NOT_SAVED"):
        fns.nobody(1)


@pytest.mark.parametrize(
    ("what", "kind"),
    [("jitted", jax.jit), ("plain", lambda f: f), ("ours", oaot.jit)],
)
def test_any_callable_can_be_the_live_function(saved, what, kind):
    def double(x):
        return x * 2

    state, fns = made.restore(saved, fns={"double": kind(double)}, verify="signature")
    with watching() as watched:
        assert float(fns.double(state["a"])[0]) == 2
    assert watched.work("double") == []
    assert fns.report["double"].verdict is oaot.Verdict.LOADED

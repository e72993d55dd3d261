"""`orbax-aot check` and `oaot.check`: what a restore would decide, here and elsewhere."""

from __future__ import annotations

import json

import cli_checkpoint as saved
import cli_support as support
import jax
import pytest

import orbax_aot as oaot
from orbax_aot import executable as executable_lib
from orbax_aot.remedies import REMEDIES
from orbax_aot.report import ReasonCode, Verdict


def codes(report: oaot.FunctionReport) -> list[str]:
    return [reason.code.name for reason in report.reasons]


def test_what_was_saved_here_loads_here_and_nothing_is_loaded_to_tell(saved_root):
    before = executable_lib.counters["loads"]
    report = oaot.check(saved_root)
    assert executable_lib.counters["loads"] == before
    assert {name: r.verdict for name, r in report.items()} == {
        "train_step": Verdict.LOADED,
        "double": Verdict.LOADED,
        "calls_back": Verdict.REFUSED,
    }
    assert codes(report["calls_back"]) == ["NEEDS_SOURCE"]
    assert report["train_step"].nbytes > 1000


def test_check_decides_what_restore_decides(saved_root):
    import orbax.checkpoint as ocp

    for where in (
        {},
        {"mesh": saved.make_mesh((4, 2))},
        {"mesh": saved.make_mesh((2, 2))},
        {"devices": jax.devices()[::-1]},
        {"devices": jax.devices()[:4]},
    ):
        with ocp.CheckpointManager(saved_root, item_handlers=oaot.AotHandler()) as manager:
            restored = manager.restore(2, args=oaot.AotRestore(**where)).fns.report
        checked = oaot.check(saved_root, **where)
        for name in ("train_step", "double"):
            assert checked[name].verdict is restored[name].verdict, (where, name)
            assert checked[name].reasons == restored[name].reasons, (where, name)


def test_other_places_can_be_asked_about(saved_root):
    ask = lambda **where: oaot.check(saved_root, **where)["train_step"]
    assert ask(mesh={"data": 2, "model": 4}).verdict is Verdict.LOADED
    assert ask(devices=64).verdict is Verdict.LOADED
    assert ask(devices=64, mesh={"data": 2, "model": 4}).verdict is Verdict.LOADED
    (reason,) = ask(mesh={"data": 8, "model": 8}).reasons
    assert str(reason) == "DEVICE_COUNT: saved for 8 devices, here 64 devices"
    indivisible = ask(mesh={"data": 16, "model": 4})
    assert indivisible.verdict is Verdict.REFUSED
    assert codes(indivisible) == ["DEVICE_COUNT", "MESH_SHAPE"]
    (reason,) = ask(mesh={"data": 4, "model": 2}).reasons
    assert str(reason) == "MESH_SHAPE: saved data=2xmodel=4, here data=4xmodel=2"
    assert ask(devices=jax.devices()[4:] + jax.devices()[:4]).verdict is Verdict.REMAPPED


def test_a_platform_that_is_not_here_can_be_asked_about(saved_root):
    report = oaot.check(saved_root, platform="tpu")
    assert report.note == "There is no tpu here, and nothing was compiled for one."
    assert report["train_step"].verdict is Verdict.REBUILT
    assert codes(report["train_step"])[0] == "PLATFORM"
    assert oaot.check(saved_root, platform="rocm")["train_step"].verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"devices": 0}, "devices=0: at least one."),
        ({"devices": 4, "mesh": {"data": 8}}, "A mesh of 8 devices does not fit on 4."),
    ],
)
def test_what_cannot_be_meant_is_refused(saved_root, where, message):
    with pytest.raises(ValueError) as caught:
        oaot.check(saved_root, **where)
    assert str(caught.value) == message


def test_exit_codes_are_for_scripts(saved_root):
    check = lambda *options: support.run("check", str(saved_root), *options).exit_code
    assert check("-f", "train_step", "-f", "double") == 0
    assert check("-f", "train_step", "--mesh", "data=4,model=2") == 3
    assert check("-f", "train_step", "--devices", "4") == 3
    assert check("-f", "double", "--devices", "4") == 0
    assert check("-f", "train_step", "--platform", "rocm") == 4
    assert check() == 4
    assert check("--mesh", "data=x") == 2
    assert check("--mesh", "data=2,data=4") == 2
    assert check("--mesh", "data=16", "--devices", "8") == 2


def test_each_reason_is_printed_with_both_values_and_what_to_do(saved_root):
    result = support.run("check", str(saved_root), "--mesh", "data=4,model=2")
    support.assert_snapshot("check", result.output)
    result = support.run("check", str(saved_root), "--platform", "tpu", "-f", "double")
    support.assert_snapshot("check_tpu", result.output)


def test_json_says_the_same(saved_root):
    result = support.run("check", str(saved_root), "--json", "-f", "train_step", "--devices", "4")
    told = json.loads(result.output)
    assert list(told["functions"]) == ["train_step"]
    assert told["functions"]["train_step"]["verdict"] == "REBUILT"
    assert told["functions"]["train_step"]["reasons"] == [
        {"code": "DEVICE_COUNT", "saved": "for 8 devices", "current": "4 devices"}
    ]


def test_there_is_something_to_do_about_each_reason():
    assert list(REMEDIES) == list(ReasonCode)


def test_the_texts_of_the_programs_can_be_written(saved_root, tmp_path):
    result = support.run(
        "inspect", str(saved_root), "--stablehlo", str(tmp_path), "--hlo", str(tmp_path)
    )
    assert result.exit_code == 0
    text = (tmp_path / "train_step.0.stablehlo.txt").read_text()
    assert 'sdy.mesh @mesh = <["data"=2, "model"=4]>' in text
    assert (tmp_path / "double.0.hlo.txt").read_text().startswith("HloModule jit_double")
    assert not (tmp_path / "calls_back.0.hlo.txt").exists()


def test_the_same_answer_comes_from_a_shell(saved_root):
    done = support.run_process("check", str(saved_root), "-f", "train_step")
    assert (done.returncode, done.stdout) == (0, "train_step  LOADED\n"), done.stderr

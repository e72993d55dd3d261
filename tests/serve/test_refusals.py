"""What cannot be served on another mesh without its source: each gives its reason, and nothing else is lost."""

from __future__ import annotations

import shutil

import jax
import pytest
from msgspec.structs import replace
from stored import age_portable, body_of, damage_portable

from orbax_aot import plan, topology
from orbax_aot.report import Reason, ReasonCode, Verdict

OTHER_SHAPE = "MESH_SHAPE: saved data=2xmodel=4, here data=4xmodel=2"
FEWER = "DEVICE_COUNT: saved for 8 devices, here 4 devices"
PER_DEVICE = (
    "NEEDS_SOURCE: The StableHLO cannot be moved to another mesh: it computes device by device "
    "(sdy.manual_computation, stablehlo.all_reduce, as shard_map does). Pass the live function, or restore on a mesh "
    "of the saved shape."
)
NO_EXPORT = (
    "NOT_SERIALIZABLE: No StableHLO was stored: the function has effects outside the program (host callbacks). "
    "Remove callbacks and debug prints to store it."
)
CALLS_BACK = "NEEDS_SOURCE: the program calls back into Python; pass the live function"
INDIVISIBLE = (
    "MESH_SHAPE: Dimension 1 of input 0, float32[8,12], is split over model, and 12 does not divide into 8 parts. "
    "Choose other sizes for the mesh."
)
RENAMED = (
    "MESH_SHAPE: The program's mesh has axes data, model, this one x, y: data, model missing, x, y new. "
    "Name the axes alike."
)
BARE = "NOT_SERIALIZABLE: a jax.stages.Compiled holds no StableHLO; save an AotFunction or an Executable"
RENAMED_SHAPE = "MESH_SHAPE: saved data=2xmodel=4, here x=2xy=4"

# Where: what each function is refused for; those not named work.
CASES = {
    "the saved mesh": (dict(shape=(2, 4)), {"calls_back": [CALLS_BACK]}),
    "another shape": (
        dict(shape=(4, 2)),
        {"per_device": [OTHER_SHAPE, PER_DEVICE], "calls_back": [OTHER_SHAPE, NO_EXPORT]},
    ),
    "fewer devices": (
        dict(shape=(2, 2)),
        {"per_device": [FEWER, PER_DEVICE], "calls_back": [FEWER, NO_EXPORT]},
    ),
    "a size that does not divide": (
        dict(shape=(1, 8), names=["double"]),
        {"double": ["MESH_SHAPE: saved data=2xmodel=4, here data=1xmodel=8", INDIVISIBLE]},
    ),
    "renamed axes": (
        dict(shape=(2, 4), axes=("x", "y")),
        {
            "double": [RENAMED_SHAPE, RENAMED],
            "per_device": [RENAMED_SHAPE, RENAMED],
            "calls_back": [RENAMED_SHAPE, NO_EXPORT],
        },
    ),
    "saved as a Compiled": (dict(shape=(2, 2), step=2), {"double": [FEWER, BARE]}),
    "StableHLO for another platform": (
        dict(shape=(2, 2), step=3),
        {"double": [FEWER, "PLATFORM: saved StableHLO for tpu, here cpu"]},
    ),
    "saved with portable=False": (
        dict(shape=(2, 2), step=4),
        {"double": [FEWER, "NEEDS_SOURCE: no StableHLO was stored (portable=False)"]},
    ),
}


@pytest.fixture(scope="module")
def saved(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("immovable")
    return path, trainer.run("immovable_training:save_all", path)


@pytest.mark.parametrize("case", CASES)
def test_a_function_that_cannot_run_there_says_why_and_the_others_run(saved, server, case):
    path, expected = saved
    how, refused = CASES[case]
    found = server.run("serve_cases:call_each", path, **how)
    assert found["w"] == expected["w"]
    assert found["tracebacks"] == []
    for name, function in found["functions"].items():
        if name in refused:
            listed = "; ".join(reason.rstrip(".") for reason in refused[name])
            assert function["verdict"] == "REFUSED"
            assert function["reasons"] == refused[name]
            assert function["error"] == (
                f"IncompatibleExecutableError: {name}: cannot be called here: {listed}. "
                "Pass the live function to AotRestore(fns={...}) to compile it."
            )
        else:
            assert function["verdict"] in ("LOADED", "REBUILT")
            assert function["result"] == expected[name]
    assert set(refused) <= set(found["functions"])


@pytest.mark.parametrize("case", CASES)
def test_each_refusal_is_logged_once_as_a_warning(saved, server, case):
    how, refused = CASES[case]
    found = server.run("serve_cases:call_each", saved[0], **how)
    warnings = [line for line in found["lines"] if line.startswith("WARNING")]
    assert sorted(line.partition(" in ")[0] for line in warnings) == sorted(
        f"WARNING {name}: refused" for name in refused
    )
    for name, reasons in refused.items():
        (line,) = [line for line in warnings if f" {name}: " in line]
        assert line.endswith(f" ({'; '.join(reasons)})")


def test_raising_on_a_mismatch_names_them_all_before_the_state_is_touched(saved, server):
    found = server.run("serve_cases:restore_or_raise", saved[0], (4, 2))
    head, *functions, tail = found.split("\n")
    assert head.startswith("IncompatibleExecutableError: ")
    assert head.endswith(": saved executables cannot be used here:")
    assert [line.partition(" in ")[0].strip() for line in functions] == [
        "calls_back: REFUSED",
        "double: REBUILT",
        "per_device: REFUSED",
    ]
    assert tail == "The state was not touched. Pass on_mismatch='recompile' to compile them anew."


@pytest.fixture
def changed(saved, tmp_path):
    """A copy of the checkpoint's first step, to be changed."""
    path = tmp_path / "changed"
    shutil.copytree(saved[0], path)
    return path


def test_an_export_of_a_newer_jax_is_refused_and_the_executable_still_runs(saved, changed, server):
    age_portable(changed, "double")
    newest = jax.export.maximum_supported_calling_convention_version
    newer = (
        f"JAX_VERSION: The StableHLO was stored by a newer JAX (calling convention 99, here at most {newest}). "
        "Update jax and jaxlib."
    )
    found = server.run("serve_cases:call_each", changed, (2, 2), ["double"])
    assert found["functions"]["double"]["reasons"] == [FEWER, newer]
    assert found["functions"]["double"]["verdict"] == "REFUSED"
    assert found["w"] == saved[1]["w"]
    found = server.run("serve_cases:call_each", changed, (2, 4), ["double"])
    assert found["functions"]["double"]["verdict"] == "LOADED"
    assert found["functions"]["double"]["result"] == saved[1]["double"]


def test_damaged_stablehlo_is_refused_before_it_is_read(saved, changed, server):
    damage_portable(changed, "double")
    found = server.run("serve_cases:call_each", changed, (2, 2), ["double"])
    function = found["functions"]["double"]
    assert (function["verdict"], function["codes"]) == ("REFUSED", ["DEVICE_COUNT", "CORRUPT"])
    assert function["reasons"][1].endswith(
        "portable.stablehlo.zst: the stored bytes are damaged. Save this step again."
    )
    assert found["w"] == saved[1]["w"]


def test_a_damaged_executable_is_rebuilt_from_the_stablehlo(saved, changed, server):
    function = body_of(changed).functions["double"]
    folder = changed / "1" / "default" / "_aot" / function.folder / function.signatures[0].folder
    (file,) = folder.glob("*.pjrt.zst")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = server.run("serve_cases:call_each", changed, (2, 4), ["double"])
    assert found["functions"]["double"]["verdict"] == "REBUILT"
    assert found["functions"]["double"]["codes"] == ["CORRUPT"]
    assert found["functions"]["double"]["result"] == saved[1]["double"]


def test_stablehlo_for_cuda_is_for_devices_that_call_themselves_gpu(saved):
    body = body_of(saved[0])
    (signature,) = body.functions["double"].signatures
    here = topology.describe_machine()
    gpu = replace(here, topology=replace(here.topology, platform="gpu"))
    for platforms, verdict in (
        (("cuda",), Verdict.REBUILT),
        (("cpu", "rocm"), Verdict.REBUILT),
        (("cpu",), Verdict.REFUSED),
    ):
        portable = replace(signature.portable, platforms=platforms)
        decision = plan.decide_signature(
            replace(signature, portable=portable), body, gpu, plan.Request(), plan.Wanted()
        )
        assert decision.verdict is verdict
    assert decision.reasons[-1] == Reason(ReasonCode.PLATFORM, "StableHLO for cpu", "gpu")


@pytest.fixture(scope="module")
def explicit(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("explicit")
    return path, trainer.run("immovable_training:save_explicit", path)


@pytest.mark.parametrize("types", ["Explicit", "Auto"])
@pytest.mark.parametrize(
    ("shape", "verdict"), [((2, 4), "LOADED"), ((2, 2), "REBUILT"), ((4, 2), "REBUILT")]
)
def test_a_program_over_explicit_axes_takes_arrays_over_axes_of_either_type(
    explicit, server, shape, verdict, types
):
    path, expected = explicit
    found = server.run("serve_cases:call_explicit", path, shape, types)
    assert found["verdict"] == verdict
    assert found["result"] == expected
    assert found["at"]["spec"] == ["data", "model"]
    assert found["at"]["mesh"] == {"data": shape[0], "model": shape[1]}

"""Executables for TPUs, compiled on a machine that has none; needs libtpu, so `make test-topologies` runs it."""

from __future__ import annotations

import json
import os

import pytest
import topology_support

LIBTPU = os.environ.get("ORBAX_AOT_LIBTPU", "")

pytestmark = pytest.mark.skipif(not LIBTPU, reason="needs libtpu: make test-topologies")

TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
CHECKPOINT = topology_support.CHECKPOINT


def run(*command: str):
    return topology_support.run(LIBTPU, *command)


def orbax_aot(*arguments: str):
    return run("-m", "orbax_aot.cli", *arguments)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """A checkpoint of the CPU, precompiled for two kinds of TPU."""
    root = str(tmp_path_factory.mktemp("tpu") / "root")
    done = run("-c", CHECKPOINT, root)
    assert done.returncode == 0, done.stderr
    options = [word for name in TOPOLOGIES for word in ("--topology", name)]
    done = orbax_aot("precompile", root, *options, "-f", "train_step", "-f", "double")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def check(root: str, *options: str) -> tuple[int, dict[str, dict]]:
    done = orbax_aot("check", root, "--json", "-f", "train_step", "-f", "double", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["functions"]


def codes(function: dict) -> list[str]:
    return [reason["code"] for reason in function["reasons"]]


def test_the_variants_are_listed(root):
    output = orbax_aot("inspect", root, "-f", "train_step").stdout
    for kind in ("cpu x 8", "tpu x 8 (TPU v5 lite)", "tpu x 8 (TPU v6 lite)"):
        assert f": {kind}, " in output


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_they_would_load_on_the_topology_they_were_made_for(root, topology):
    for mesh in ([], ["--mesh", "data=2,model=4"]):
        code, functions = check(root, "--platform", "tpu", "--topology", topology, *mesh)
        assert {f["verdict"] for f in functions.values()} == {"LOADED"}
        assert code == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--topology", "v5p:2x2x2"], ["DEVICE_KIND", "PLATFORM_VERSION"]),
        (["--topology", "v5e:2x4", "--mesh", "data=4,model=2"], ["MESH_SHAPE"]),
        (["--topology", "v5e:4x4", "--mesh", "data=4,model=4"], ["DEVICE_COUNT"]),
    ],
)
def test_for_other_topologies_there_are_reasons(root, options, expected):
    code, functions = check(root, *options)
    assert codes(functions["train_step"]) == expected
    assert functions["train_step"]["verdict"] == "REBUILT"
    assert code == 3


def test_on_tpus_that_are_not_described_those_of_the_save_are_assumed(root):
    code, functions = check(root, "--platform", "tpu")
    assert functions["train_step"]["verdict"] == "LOADED"
    assert code == 0


def test_the_executables_of_the_cpu_still_load(root):
    _, functions = check(root)
    assert {f["verdict"] for f in functions.values()} == {"LOADED"}
    child = (
        "import sys, orbax.checkpoint as ocp, orbax_aot as oaot\n"
        "with ocp.CheckpointManager(sys.argv[1], item_handlers=oaot.AotHandler()) as manager:\n"
        "    state, fns = manager.restore(2)\n"
        "import cli_checkpoint as saved\n"
        "fns.train_step(state, saved.arguments(saved.make_mesh())[1])\n"
        "print(fns.report['train_step'].verdict)\n"
    )
    done = run("-c", child, root)
    assert done.stdout == "LOADED\n", done.stderr


def test_what_libtpu_knows_is_listed(root):
    listed = json.loads(orbax_aot("precompile", "--list", "--json").stdout)
    by_name = {target["name"]: target for target in listed}
    assert by_name["v5e:2x4"] == {
        "name": "v5e:2x4",
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "devices": 8,
        "processes": 2,
    }
    assert len(by_name) > 20


def test_a_topology_that_libtpu_does_not_know_is_told(root):
    done = orbax_aot("precompile", root, "--topology", "v5e:3x5")
    assert done.returncode == 1
    assert "v5e:3x5: " in done.stderr and "precompile --list" in done.stderr

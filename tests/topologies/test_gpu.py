"""Executables for NVIDIA GPUs, compiled on a machine that has none; `make test-gpu-topologies` runs it."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import topology_support

CUDA = os.environ.get("ORBAX_AOT_CUDA", "")
GPU = pathlib.Path(__file__).with_name("hopper.txtpb")

pytestmark = pytest.mark.skipif(
    not CUDA, reason="needs JAX's CUDA plugin: make test-gpu-topologies"
)


def orbax_aot(*arguments: str):
    return topology_support.run(CUDA, "-m", "orbax_aot.cli", *arguments)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """A checkpoint of the CPU, precompiled for eight GPUs."""
    root = str(tmp_path_factory.mktemp("gpu") / "root")
    done = topology_support.run(CUDA, "-c", topology_support.CHECKPOINT, root)
    assert done.returncode == 0, done.stderr
    names = ("-f", "train_step", "-f", "double")
    done = orbax_aot("precompile", root, "--topology", f"cuda:{GPU}:8", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def check(root: str, *options: str) -> tuple[int, dict[str, dict]]:
    done = orbax_aot("check", root, "--json", "-f", "train_step", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["functions"]


def test_the_variant_is_listed(root):
    output = orbax_aot("inspect", root, "-f", "train_step").stdout
    assert ": gpu x 8 (NVIDIA H100 80GB HBM3), " in output


def test_it_would_load_on_such_gpus_and_not_on_half_as_many(root):
    code, functions = check(root, "--topology", f"cuda:{GPU}:8", "--mesh", "data=2,model=4")
    assert (code, functions["train_step"]["verdict"]) == (0, "LOADED")
    code, functions = check(root, "--topology", f"cuda:{GPU}:4", "--mesh", "data=1,model=4")
    assert [r["code"] for r in functions["train_step"]["reasons"]] == ["DEVICE_COUNT"]
    assert code == 3


def test_the_executable_of_the_cpu_would_still_load(root):
    code, functions = check(root)
    assert (code, functions["train_step"]["verdict"]) == (0, "LOADED")


def test_a_file_that_is_no_description_is_told(root, tmp_path):
    (tmp_path / "x.txtpb").write_text("no proto {")
    done = orbax_aot("precompile", root, "--topology", f"cuda:{tmp_path / 'x.txtpb'}:8")
    assert done.returncode == 1
    assert "Failed to parse GpuTargetConfigProto" in done.stderr.splitlines()[-1]

"""`orbax-aot precompile`: executables for CPU meshes of other sizes, made here and run in another process."""

from __future__ import annotations

import json
import pathlib

import cli_checkpoint as saved
import cli_support as support
import jax
import numpy as np
import pytest

import orbax_aot as oaot
from orbax_aot.report import Verdict

_CHILD = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + sys.argv[2]
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, orbax.checkpoint as ocp, orbax_aot as oaot
import cli_checkpoint as saved
mesh = saved.make_mesh(tuple(map(int, sys.argv[3].split("x"))))
with ocp.CheckpointManager(sys.argv[1], item_handlers=oaot.AotHandler()) as manager:
    state, fns = manager.restore(2, args=oaot.AotRestore(fns=["train_step", "double"], mesh=mesh))
_, batch = saved.arguments(mesh)
new, loss = fns.train_step(state, batch)
print(fns.report["train_step"].verdict, fns.report["double"].verdict, len(loss.devices()))
np.save(sys.argv[4], np.asarray(new["params"]["w"]))
"""


def restore_on(root: pathlib.Path, count: int, shape: str) -> tuple[str, np.ndarray]:
    """Restores and runs in a process with `count` devices; returns verdicts and new weights."""
    out = root / f"{shape}.npy"
    done = support.run_python("-c", _CHILD, str(root), str(count), shape, str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), np.load(out)


def test_a_variant_for_more_devices_than_are_here_is_found_and_is_right_there(root):
    kept = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    result = support.run(
        "precompile",
        str(root),
        "--topology",
        "cpu:16",
        "--mesh",
        "data=4,model=4",
        "-f",
        "train_step",
    )
    assert result.exit_code == 0, result.output
    variants = oaot.inspect(root).functions["train_step"].signatures[0].variants
    assert [v.topology.count for v in variants] == [8, 16]
    assert "variant 1: cpu x 16" in support.run("inspect", str(root)).output
    changed = {p.name for p, data in kept.items() if p.read_bytes() != data}
    assert changed == {"manifest.json"}

    state, batch = saved.arguments(saved.make_mesh())
    expected = np.asarray(jax.jit(saved.train_step)(state, batch)[0]["params"]["w"])
    for count, shape in ((16, "4x4"), (8, "2x4")):  # the variant that was there still loads
        told, weights = restore_on(root, count, shape)
        assert told == f"LOADED LOADED {count}"
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_compiling_again_for_the_same_place_supersedes(root):
    for _ in range(2):
        (result,) = oaot.precompile(
            root, "cpu:2", functions=["train_step"], mesh={"data": 1, "model": 2}
        )
        assert result.reason is None and result.nbytes > 1000
    variants = oaot.inspect(root).functions["train_step"].signatures[0].variants
    assert [v.topology.count for v in variants] == [8, 2]
    assert oaot.check(root, mesh={"data": 1, "model": 2})["train_step"].verdict is Verdict.LOADED
    assert oaot.check(root)["train_step"].verdict is Verdict.LOADED


def test_what_cannot_be_compiled_is_told_and_the_rest_is_committed(root):
    results = {r.where: r for r in oaot.precompile(root, "cpu:4")}
    assert results["double/0"].reason is None
    assert str(results["train_step/0"].reason) == (
        "MESH_SHAPE: the program was saved over data=2,model=4; pass a mesh of these axes for the 4 devices of cpu:4"
    )
    assert results["calls_back/0"].reason is not None
    assert results["calls_back/0"].reason.code.name == "NOT_SAVED"
    assert support.run("precompile", str(root), "--topology", "cpu:4").exit_code == 3


def test_a_mesh_that_does_not_divide_an_argument_is_told(root):
    (result,) = oaot.precompile(
        root, "cpu:16", functions=["train_step"], mesh={"data": 16, "model": 1}
    )
    assert result.reason is not None and result.reason.code.name == "MESH_SHAPE"
    assert "8 does not divide into 16 parts" in result.reason.saved
    assert len(oaot.inspect(root).functions["train_step"].signatures[0].variants) == 1


def test_a_damaged_stablehlo_is_told(root):
    (path,) = (root / "2/default/_aot/double").rglob("*.stablehlo.zst")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (result,) = oaot.precompile(root, "cpu:1", functions=["double"])
    assert result.reason is not None and result.reason.code.name == "CORRUPT"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--topology", "cpu:0"], 1, "cpu:0: between 1 and 4096 CPU devices."),
        (["--topology", "cpu:4", "--mesh", "data=8"], 1, "cpu:4 has 4 devices, the mesh 8."),
        (["--topology", "cpu:4", "-f", "nope"], 2, "no function 'nope' there"),
        ([], 2, "PATH and --topology are needed, or --list."),
    ],
)
def test_what_cannot_be_meant_is_refused(root, options, code, said):
    result = support.run("precompile", str(root), *options)
    assert result.exit_code == code
    assert said in result.output


def test_json_tells_what_was_added(root):
    result = support.run("precompile", str(root), "--topology", "cpu:1", "-f", "double", "--json")
    told = json.loads(result.stdout)
    assert [r["where"] for r in told["cpu:1"]] == ["double/0"]
    assert told["cpu:1"][0]["nbytes"] > 1000
    assert "double/0: compiling for cpu:1" in result.stderr

"""What older versions wrote is read by this one, on each supported JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import independent_reader
import make_golden
import pytest

import orbax_aot as oaot
from orbax_aot import manifest as m

_HERE = Path(__file__).parent
pytestmark = pytest.mark.xdist_group("golden")  # one process makes the outcomes
_GOLDEN = sorted(_HERE.glob("format-*"))
_EXPECTED_REASONS = {"JAX_VERSION", "CPU_FEATURES", "PLATFORM_VERSION", "JAX_CONFIG", "XLA_FLAGS"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(_HERE / "golden_child.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_there_is_a_golden_checkpoint_of_each_supported_jax_and_of_this_format() -> None:
    version = ".".join(map(str, m.FORMAT_VERSION))
    jax_versions = {
        p.name.rpartition("-")[2] for p in _GOLDEN if p.name.startswith(f"format-{version}-")
    }
    assert {v.rsplit(".", v.count(".") - 1)[0] for v in jax_versions} >= {"0.10", "0.11", "0.12"}


@pytest.mark.parametrize("folder", _GOLDEN, ids=lambda p: p.name)
def test_golden_checkpoint_was_never_changed(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    recorded = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert make_golden.digests(folder) == recorded


@pytest.mark.parametrize("folder", _GOLDEN, ids=lambda p: p.name)
def test_golden_weights_come_back(folder: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes[folder.name]["weights"] == make_golden.WEIGHTS


@pytest.mark.parametrize("folder", _GOLDEN, ids=lambda p: p.name)
def test_golden_functions_run_or_say_why_not(folder: Path, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[folder.name]
    assert outcome["verdicts"].pop("never_called") == "REFUSED"
    assert outcome["reasons"].pop("never_called") == ["NEVER_CALLED"]
    expected = json.loads((folder / "expected.json").read_text())
    for name, verdict in outcome["verdicts"].items():
        assert set(outcome["reasons"][name]) <= _EXPECTED_REASONS, (name, outcome["reasons"][name])
        if verdict == "REFUSED":  # StableHLO of a newer JAX
            assert "JAX_VERSION" in outcome["reasons"][name]
            continue
        assert verdict in ("LOADED", "REBUILT")
        results = outcome["results"][name]
        assert (results if name == "train_step" else results[0]) == expected[name]


def test_the_golden_checkpoint_of_this_jax_is_loaded_or_its_processor_is_another(
    outcomes: dict[str, Any],
) -> None:
    import jax

    for name, outcome in outcomes.items():
        if name.endswith(f"-jax-{jax.__version__}"):
            for function, verdict in outcome["verdicts"].items():
                reasons = outcome["reasons"][function]
                assert verdict == "LOADED" or reasons in (["CPU_FEATURES"], ["NEVER_CALLED"])


@pytest.mark.parametrize("folder", _GOLDEN, ids=lambda p: p.name)
def test_a_second_reader_finds_what_the_package_finds(folder: Path) -> None:
    item = folder / "item"
    ours = oaot.verify(item, trust=oaot.Trust.anyone())
    body = independent_reader.read_manifest(str(item))
    assert sorted(body["functions"]) == sorted(ours.functions)
    files = independent_reader.read_files(str(item), body)
    assert {name: len(raw) for name, raw in files.items()} == {
        name: file.raw_nbytes for name, file in m.files_of(ours.body).items()
    }
    for name, function in ours.functions.items():
        theirs = body["functions"][name].get("signatures", [])
        assert [[i["path"] for i in s["inputs"]] for s in theirs] == [
            [leaf.path for leaf in s.inputs] for s in function.signatures
        ]

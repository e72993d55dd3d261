"""Checkpoints saved on one JAX and restored on another.

`ORBAX_AOT_TEST_PYTHONS` names interpreters, joined as in `PATH`, one for each supported JAX. Without it there is only
this process's own, and the other pairs are reported as skipped.
"""

from __future__ import annotations

import os
import sys

import jax
import pytest
import upgrade_table

PYTHONS = [p for p in os.environ.get("ORBAX_AOT_TEST_PYTHONS", "").split(os.pathsep) if p]
HOWS = ("v0, live function", "v0, no source", "v1, live function", "v1, no source")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upgrade")
    table = upgrade_table.make_table(PYTHONS or [sys.executable], str(folder))
    upgrade_table.print_table(table)
    return table


def pairs(table, same):
    versions = table["versions"]
    if not same and len(versions) < 2:
        pytest.skip(
            f"only JAX {jax.__version__} here; name interpreters with others in ORBAX_AOT_TEST_PYTHONS"
        )
    return [(old, new) for old in versions for new in versions if (old == new) is same]


def test_each_named_interpreter_has_a_jax_of_its_own(table):
    assert len(table["versions"]) == max(len(PYTHONS), 1)


@pytest.mark.parametrize("how", HOWS)
def test_on_the_same_jax_the_saved_executable_runs(table, how):
    for old, new in pairs(table, same=True):
        found = table["restored"][old][new][how]
        assert found["report"]["step"] == {"verdict": "REMAPPED", "reasons": []}, old
        assert found["after"] == table["saved"][old]["after"]


@pytest.mark.parametrize("how", [h for h in HOWS if "live" in h])
def test_on_another_jax_a_live_function_is_compiled_anew_and_the_version_is_named(table, how):
    for old, new in pairs(table, same=False):
        found = table["restored"][old][new][how]
        assert found["report"]["step"]["verdict"] == "RECOMPILED", (old, new)
        assert found["report"]["step"]["reasons"][0] == (
            f"JAX_VERSION: saved jax {old}, jaxlib {old}, here jax {new}, jaxlib {new}"
        )
        assert found["loss"] == pytest.approx(table["saved"][old]["loss"], rel=1e-5)


@pytest.mark.parametrize("how", [h for h in HOWS if "no source" in h])
def test_on_another_jax_stablehlo_is_compiled_unless_it_is_too_new(table, how):
    for old, new in pairs(table, same=False):
        found = table["restored"][old][new][how]
        report = found["report"]["step"]
        assert report["reasons"][0].startswith(f"JAX_VERSION: saved jax {old}"), (old, new)
        if report["verdict"] == "REFUSED":
            assert number(old) > number(new)
            assert "The StableHLO was stored by a newer JAX" in report["reasons"][-1]
            assert (
                "Pass the live function to AotRestore(fns={...}) to compile it." in found["error"]
            )
        else:
            assert report["verdict"] == "REBUILT", (old, new)
            assert found["loss"] == pytest.approx(table["saved"][old]["loss"], rel=1e-5)


def number(version):
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize("how", HOWS)
def test_the_weights_come_back_on_each_jax(table, how):
    for same in (True, False) if len(table["versions"]) > 1 else (True,):
        for old, new in pairs(table, same=same):
            found = table["restored"][old][new][how]
            assert found["state"] == table["saved"][old]["state"], (old, new)
            assert found["sharded"]
            assert found["tracebacks"] == []

"""`probe=True`: what kills a child process is not loaded here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trust_support as support

from orbax_aot import probe

# Stands in for the package in the child: ends the process where the real one would load or run.
_SITE = """
import os
if os.environ.get("ORBAX_AOT_PROBE"):
    import importlib.abc, sys
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "orbax_aot.executable" and {where!r} == "load":
                os.kill(os.getpid(), 11)
            if name == "orbax_aot._jax.dispatch" and {where!r} == "run" and "orbax_aot.executable" in sys.modules:
                os.kill(os.getpid(), 6)
            if name == "jax" and {where!r} == "start":
                os._exit(3)
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def child_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def at(where: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(_SITE.format(where=where))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")

    return at


def test_bytes_that_a_child_survives_are_loaded(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str] = []
    ask = probe._Child.ask
    monkeypatch.setattr(probe._Child, "ask", lambda *a: (answers.append(ask(*a)), answers[-1])[1])
    outcome = support.restore(item, probe=True)
    assert outcome.verdict == "LOADED"
    assert answers == ["ready", "loaded", "ran"]
    assert np.array_equal(outcome.call(), support.EXPECTED)


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("load", "was ended by SIGSEGV while loading it"),
        ("run", "was ended by SIGABRT while running it"),
    ],
)
def test_bytes_that_kill_a_child_are_not_loaded(
    item: Path, child_dies, where: str, how: str
) -> None:
    child_dies(where)
    outcome = support.restore(item, probe=True)
    assert outcome.loads == 0
    assert outcome.verdict == "REBUILT"
    assert outcome.text == f"LOAD_FAILED: IncompatibleExecutableError: a probe process {how}"
    assert outcome.weights
    assert np.array_equal(outcome.call(), support.EXPECTED)


def test_a_child_that_does_not_start_says_nothing_about_the_bytes(item: Path, child_dies) -> None:
    child_dies("start")
    assert support.restore(item, probe=True).verdict == "LOADED"


def test_without_being_asked_for_no_child_is_started(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_Child", lambda: pytest.fail("a child was started"))
    assert support.restore(item).verdict == "LOADED"


def test_the_child_ends_with_the_restore(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[probe._Child] = []

    class Child(probe._Child):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(probe, "_Child", Child)
    support.restore(item, probe=True)
    assert started[0]._process.wait(timeout=30) is not None

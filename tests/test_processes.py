"""The helper that runs cases in child processes: it must see failures and deaths, or it proves nothing."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from processes import CaseFailed, Child, ChildDied


def add(a, b):
    return a + b


def fail():
    raise ValueError("as asked")


def die(signum):
    print("last words")
    os.kill(os.getpid(), signum)
    time.sleep(10)


def hang():
    time.sleep(60)


def environment(name):
    return os.environ.get(name)


def imported():
    return sorted(sys.modules)


def test_results_failures_and_deaths_come_back_and_the_next_run_starts_anew():
    with Child(env={"CASE": "yes", "HOME": None}) as child:
        assert child.run(add, 1, b=2) == 3
        pid = child.pid
        with pytest.raises(CaseFailed, match="ValueError: as asked"):
            child.run(fail)
        assert child.run(environment, "CASE") == "yes" and child.run(environment, "HOME") is None
        assert child.pid == pid
        with pytest.raises(ChildDied, match="last words") as death:
            child.run(die, int(signal.SIGABRT))
        assert death.value.returncode == -signal.SIGABRT and child.pid is None
        assert child.run("test_processes:add", 2, 3) == 5
        assert child.pid not in (pid, None)


def test_a_case_that_hangs_is_ended():
    with (
        Child(timeout_secs=3) as child,
        pytest.raises(ChildDied, match="no answer in 3 s"),
    ):
        child.run(hang)


def test_a_child_has_imported_nothing_that_was_not_asked_for():
    with Child() as child:
        assert "jax" not in child.run(imported)

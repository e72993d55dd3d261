"""Bytes that kill the process: at most two starts die of them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trust_support as support

from orbax_aot import crash

_CHILD = Path(__file__).with_name("crash_child.py")


def _start(item: Path, where: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, str(_CHILD), str(item), where], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return done.returncode, None
    return 0, json.loads(done.stdout)


@pytest.mark.parametrize("where", ["load", "run"])
def test_the_third_start_does_not_die(item: Path, where: str) -> None:
    assert _start(item, where)[0] == -signal.SIGABRT
    assert _start(item, where)[0] == -signal.SIGABRT
    status, found = _start(item, where if where == "load" else "fine")
    assert status == 0
    assert found["verdict"] == "REBUILT"
    assert found["text"].startswith(
        "LOAD_FAILED: IncompatibleExecutableError: 2 processes ended while they loaded it or first ran it."
    )
    assert found["weights"]
    assert found["result"] == support.EXPECTED.tolist()


def test_one_crash_is_forgiven_and_a_good_start_leaves_no_marker(item: Path) -> None:
    assert _start(item, "load")[0] == -signal.SIGABRT
    status, found = _start(item, "fine")
    assert (status, found["verdict"]) == (0, "LOADED")
    assert len(os.listdir(crash.folder())) == 1  # that of the crash


def test_a_restore_leaves_no_marker(item: Path) -> None:
    outcome = support.restore(item)
    outcome.call()
    deadline = time.monotonic() + 10
    while os.path.exists(crash.folder()) and os.listdir(crash.folder()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.path.isdir(crash.folder())  # there was one


def test_markers_of_living_processes_do_not_count() -> None:
    key = crash.key_of("payload")
    markers = [crash.place(key) for _ in range(5)]
    assert crash.find_crashes(key) == ""
    for marker in markers:
        assert marker is not None
        marker.remove()
    assert os.listdir(crash.folder()) == []


def test_other_software_gets_another_chance() -> None:
    assert crash.key_of("payload", "driver 1") != crash.key_of("payload", "driver 2")
    assert crash.key_of("payload", "driver 1") == crash.key_of("payload", "driver 1")


def _leave_marker(key: str, name: str, age_secs: float = 0.0) -> Path:
    path = Path(crash.folder(), f"{key}-{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - age_secs,) * 2)
    return path


def test_old_markers_are_forgotten() -> None:
    key = crash.key_of("payload")
    old = [_leave_marker(key, name, 31 * 86400) for name in "ab"]
    assert crash.find_crashes(key) == ""
    assert not any(path.exists() for path in old)
    for name in "ab":
        _leave_marker(key, name)
    assert crash.find_crashes(key)


def test_a_cache_folder_that_cannot_be_written_is_no_trouble(
    item: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    outcome = support.restore(item)
    assert outcome.verdict == "LOADED"
    outcome.call()


def test_a_marker_costs_less_than_a_millisecond() -> None:
    key = crash.key_of("payload")
    secs = []
    for _ in range(50):
        start = time.perf_counter()
        crash.find_crashes(key)
        with crash.marked(key):
            pass
        secs.append(time.perf_counter() - start)
    assert statistics.median(secs) < 0.001


def test_an_orderly_end_is_no_crash(tmp_path: Path) -> None:
    code = "from orbax_aot import crash; print(crash.place('k') is not None, crash.folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    placed, folder = done.stdout.split()
    assert placed == "True"
    assert os.listdir(folder) == []


def test_a_run_that_raises_leaves_no_marker() -> None:
    first = crash.FirstRun("k")
    with pytest.raises(ZeroDivisionError):
        first.watch(lambda: 1 / 0, lambda _: None)
    assert not first.is_due
    assert os.listdir(crash.folder()) == []


def test_the_marker_of_a_run_stays_until_its_result_is_there() -> None:
    import threading

    done = threading.Event()
    assert crash.FirstRun("k").watch(lambda: 7, lambda _: done.wait(10)) == 7
    assert len(os.listdir(crash.folder())) == 1
    done.set()
    deadline = time.monotonic() + 10
    while os.listdir(crash.folder()):
        assert time.monotonic() < deadline
        time.sleep(0.01)

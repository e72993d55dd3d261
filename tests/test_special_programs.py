"""Programs and executables that are easy to break by reloading, each run in a process that never compiled it."""

from __future__ import annotations

import pytest
import special_cases as cases
from processes import Child


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    path = tmp_path_factory.mktemp("special")
    with Child(devices=1) as child:
        return path, child.run(cases.save_special, path)


@pytest.fixture(scope="module")
def reader():
    with Child(devices=1) as child:
        yield child


@pytest.mark.parametrize("name", cases.LAPACK)
def test_lapack_functions_run_in_a_process_that_never_lowered_one(special, name):
    path, results = special
    with Child(devices=1) as child:
        assert child.run(cases.run_special, path, name) == [results[name], "LOADED", []]


@pytest.mark.parametrize("name", cases.OTHERS)
def test_other_programs_run_without_source_and_give_the_same_bits(special, reader, name):
    path, results = special
    assert reader.run(cases.run_special, path, name) == [results[name], "LOADED", []]


def test_what_came_from_a_hit_of_the_persistent_cache_runs_after_reloading(tmp_path):
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with Child(devices=1, env=env) as child:
        first = child.run(cases.compile_busy)
        assert first["hits"] == 0
    with Child(devices=1, env=env) as child:
        second = child.run(cases.compile_busy, tmp_path / "checkpoint")
        assert second["hits"] > 0
    with Child(devices=1) as child:
        third = child.run(cases.rerun, tmp_path / "checkpoint")
    assert first["result"] == second["result"] == third["result"]
    assert third["report"] == ["LOADED", []]
    assert third["work"] == []


@pytest.mark.parametrize("live", [False, True])
def test_what_was_saved_again_through_a_restore_keeps_its_bytes_and_runs(tmp_path, live):
    paths = [tmp_path / str(i) for i in range(3)]
    payload = "1/default/_aot/busy/0/0.pjrt.zst"
    with Child(devices=1) as child:
        first = child.run(cases.compile_busy, paths[0])
    for i in (0, 1):
        with Child(devices=1) as child:
            again = child.run(cases.rerun, paths[i], paths[i + 1], live)
        assert again["report"] == ["LOADED", []]
        assert again["serializations"] == 0
        assert again["result"] == first["result"]
        assert again["work"] == []
    with Child(devices=1) as child:
        last = child.run(cases.rerun, paths[2])
    assert (last["result"], last["report"]) == (first["result"], ["LOADED", []])
    stored = {(path / payload).read_bytes() for path in paths}
    assert len(stored) == 1

"""Jobs of several real processes: one decision, whatever befalls one of them."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest

JOB = pathlib.Path(__file__).with_name("job.py")
LOADED = ("LOADED", "REMAPPED")


def run_job(count: int, devices: int, folder: pathlib.Path, *scenarios: str) -> list[dict]:
    """Runs a job of `count` processes; returns the results of each process, by scenario."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, JOB, str(r), str(count), str(port), str(devices), folder, *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(count)
    ]
    results = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (
                f"process {rank} ended with {process.returncode}:\n{err[-3000:]}"
            )
            lines = [json.loads(x[7:]) for x in out.splitlines() if x.startswith("RESULT ")]
            results.append({line["scenario"]: line for line in lines})
    finally:
        for process in processes:
            process.kill()
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multihost")
    results = run_job(2, 2, folder, "save")
    return folder, results[0]["save"]["losses"]


@pytest.fixture(scope="module")
def results(saved):
    folder, _ = saved
    names = ("same", "corrupt", "blind", "changed", "nosource", "one_nosource")
    return run_job(2, 2, folder, *names, "one_nosource_other_corrupt", "missing")


def test_two_processes_load_and_train_on_bit_equal(saved, results):
    for process in results:
        assert (process["same"]["verdict"], process["same"]["losses"]) == ("LOADED", saved[1])


def test_two_processes_run_without_source(saved, results):
    for process in results:
        assert process["nosource"]["verdict"] == "LOADED"
        assert process["nosource"]["losses"] == saved[1]


@pytest.mark.parametrize("scenario", ["corrupt", "blind"])
def test_a_bad_disk_of_one_process_makes_all_recompile_and_is_named(saved, results, scenario):
    assert [p[scenario]["verdict"] for p in results] == ["RECOMPILED", "RECOMPILED"]
    assert "CORRUPT" in results[1][scenario]["reasons"]
    (reason,) = (t for t in results[0][scenario]["texts"] if t.startswith("OTHER_PROCESS"))
    assert "process 1: CORRUPT" in reason and "bad disk" in reason
    for process in results:
        assert process[scenario]["losses"] == pytest.approx(saved[1], rel=1e-6)


def test_changed_code_of_one_process_makes_all_compile_their_own(results):
    assert [p["changed"]["verdict"] for p in results] == ["RECOMPILED", "RECOMPILED"]
    assert "process 1: CODE_CHANGED" in " ".join(results[0]["changed"]["texts"])
    assert "PROGRAM_CHANGED" in results[1]["changed"]["reasons"]


def test_a_process_without_the_live_function_loads_with_the_others(saved, results):
    for process in results:
        assert process["one_nosource"]["verdict"] == "LOADED"
        assert process["one_nosource"]["losses"] == saved[1]


def test_where_one_could_not_compile_all_refuse_alike(results):
    refused = [p["one_nosource_other_corrupt"] for p in results]
    assert [r["verdict"] for r in refused] == ["REFUSED", "REFUSED"]
    assert all("cannot be called here" in r["refused"] for r in refused)
    assert "process 0: CORRUPT" in " ".join(refused[1]["texts"])


def test_a_process_that_does_not_answer_is_named_and_waited_for_no_longer_than_asked(
    saved, results
):
    report = results[0]["missing"]
    assert report["verdict"] == "RECOMPILED"
    assert report["texts"][-1] == "OTHER_PROCESS: process 1 did not answer in 3 s"
    assert report["losses"] == pytest.approx(saved[1], rel=1e-6)


def test_the_weights_come_back_in_every_scenario(results):
    for process in results:
        restored = {r["restored"] for r in process.values() if "restored" in r}
        assert len(restored) == 1


@pytest.mark.parametrize(("count", "devices"), [(1, 4), (4, 1)])
def test_as_many_devices_in_other_processes_load(saved, count, devices):
    for process in run_job(count, devices, saved[0], "same"):
        assert process["same"]["verdict"] in LOADED
        assert process["same"]["losses"] == saved[1]


def test_fewer_processes_recompile(saved):
    (first, second) = run_job(2, 1, saved[0], "same")
    for process in (first, second):
        assert process["same"]["verdict"] == "RECOMPILED"
        assert process["same"]["reasons"] == ["DEVICE_COUNT"]
        assert process["same"]["losses"] == pytest.approx(saved[1], rel=1e-5)

"""Whatever the file system does to the executables, the weights are saved and come back equal."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import trust_support as support
from fault_os import READ_FAULTS, WRITE_FAULTS, FaultyOs

import orbax_aot as oaot
from orbax_aot import files, store

_TIMEOUT_SECS = 1.0


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_restore_survives(
    item: Path, monkeypatch: pytest.MonkeyPatch, fault: str, after: int
) -> None:
    faulty = FaultyOs(fault, after, lambda: (item / "_aot").rename(item / "gone"))
    monkeypatch.setattr(files, "os", faulty)
    start = time.monotonic()
    outcome = support.restore(item, fn=support.live(), timeout_secs=_TIMEOUT_SECS)
    assert outcome.weights
    assert np.array_equal(outcome.call(), support.EXPECTED)
    verdict = outcome.fns.report["step"].verdict
    if verdict is not oaot.Verdict.LOADED:
        codes = {r.code.name for r in outcome.fns.report["step"].reasons}
        # UNTRUSTED: what cannot be looked at cannot be vouched for.
        allowed = {"LOAD_FAILED", "CORRUPT", "TIMEOUT", "UNTRUSTED"}
        if fault == "renamed":  # before the first look there was nothing
            allowed.add("NOT_SAVED")
        assert codes and codes <= allowed, codes
    if fault in ("short", "slow"):
        assert verdict is oaot.Verdict.LOADED
    assert time.monotonic() - start < 20
    if after == 0:
        assert faulty.hits


def test_the_first_stale_handle_is_tried_again(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(FaultyOs):
        def _is_due(self) -> bool:
            return super()._is_due() and self.hits == 1

    faulty = Once("ESTALE", 0)
    monkeypatch.setattr(files, "os", faulty)
    assert support.restore(item).verdict == "LOADED"
    assert faulty.hits > 1


def test_a_hanging_payload_is_given_up(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = store.Store.read

    def read(self: store.Store, name: str, *args: object) -> bytes:
        release.wait(60)
        return real(self, name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(store.Store, "read", read)
    try:
        outcome = support.restore(item, fn=support.live(), timeout_secs=_TIMEOUT_SECS)
        assert outcome.weights
        assert outcome.reasons == ["TIMEOUT"]
        assert np.array_equal(outcome.call(), support.EXPECTED)
    finally:
        release.set()


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_save_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, after: int
) -> None:
    faulty = FaultyOs(fault, after)
    monkeypatch.setattr(files, "os", faulty)
    monkeypatch.setattr("orbax_aot.saving._MANIFEST_SECS", 0.5)
    start = time.monotonic()
    handler = oaot.AotHandler(timeout_secs=_TIMEOUT_SECS)
    support.save(tmp_path / "item", handler)
    assert time.monotonic() - start < 20
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = support.restore(tmp_path / "item", fn=support.live())
    assert outcome.weights
    assert np.array_equal(outcome.call(), support.EXPECTED)
    assert np.array_equal(
        ocp.StandardCheckpointHandler().restore(tmp_path / "item")["w"], support.WEIGHTS
    )
    report = outcome.fns.report["step"]
    if report.verdict is not oaot.Verdict.LOADED:
        assert report.reasons
    if fault in ("short", "slow"):
        assert report.verdict is oaot.Verdict.LOADED
    if after == 0:
        assert faulty.hits


def test_a_full_disk_under_a_manager_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = support.live()
    step(support.WEIGHTS, 1.0)
    monkeypatch.setattr(files, "os", FaultyOs("ENOSPC", 1))
    with ocp.CheckpointManager(tmp_path / "ck", item_handlers=oaot.AotHandler()) as manager:
        manager.save(1, args=oaot.AotSave({"w": support.WEIGHTS}, fns={"step": step}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        state, fns = manager.restore(1, args=oaot.AotRestore(fns={"step": support.live()}))
        assert np.array_equal(state["w"], support.WEIGHTS)
        assert np.array_equal(fns["step"](support.WEIGHTS, 1.0), support.EXPECTED)


def test_what_was_left_behind_writes_nothing_into_a_step_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, late = threading.Event(), threading.Event()
    real = files.write

    def write(folder: object, name: str, data: bytes) -> None:
        if not name.endswith("manifest.json"):
            release.wait(60)
            late.set()
        real(folder, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write", write)
    support.save(tmp_path / "item", oaot.AotHandler(timeout_secs=0.5))
    release.set()
    assert late.wait(10)
    function = store.Store(tmp_path / "item").read_manifest().functions["step"]
    assert function.absent is not None and function.absent.code == "TIMEOUT"
    time.sleep(0.2)  # the writer had the first of two files in hand; the second is too late
    assert len([p for p in (tmp_path / "item/_aot/step").rglob("*") if p.is_file()]) == 1


def test_a_closed_store_writes_nothing(tmp_path: Path) -> None:
    place = store.Store(tmp_path)
    place.close()
    with pytest.raises(TimeoutError, match="too late to write it"):
        place.write("x", b"")
    assert not place.folder.exists()

"""All the ways in which Orbax is used: managers, registries, composites, options, loops, and readers without us."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
from orbax.checkpoint import v1 as ocp1

import orbax_aot as oaot


@pytest.fixture(scope="module")
def mesh():
    return programs.mesh_of([0, 1, 2, 3])


@pytest.fixture(scope="module")
def state(mesh):
    return {**programs.make_state(mesh), "rate": jnp.bfloat16(0.5), "count": 3, "key": np.arange(2)}


@pytest.fixture(scope="module")
def fns(mesh, state):
    fns = {"predict": programs.jitted()["predict"]}
    fns["predict"](state["params"], programs.make_batch(0, mesh))
    return fns


@pytest.fixture(scope="module")
def right(fns, state, mesh):
    return programs.digest(fns["predict"](state["params"], programs.make_batch(0, mesh)))


def target_of(state):
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def require_loaded(restored, right, mesh, params):
    assert restored.report["predict"].verdict is oaot.Verdict.LOADED
    restored.require_loaded()
    assert programs.digest(restored.predict(params, programs.make_batch(0, mesh))) == right


# -- managers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("args", ["none", "empty", "target", "names"])
def test_one_handler_for_the_only_item(tmp_path, state, fns, right, mesh, asynchronous, args):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=oaot.AotHandler()) as mngr:
        assert mngr.save(1, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        if args == "none":
            restored = mngr.restore(1)
        else:
            made = {
                "empty": oaot.AotRestore(),
                "target": oaot.AotRestore(target_of(state)),
                "names": oaot.AotRestore(fns=["predict"]),
            }[args]
            restored = mngr.restore(1, args=made)
    assert isinstance(restored, oaot.Restored)
    assert programs.digest(restored.state) == programs.digest(state)
    require_loaded(restored.fns, right, mesh, restored.state["params"])


def test_a_named_item_in_item_handlers(tmp_path, state, fns, right, mesh):
    handlers = {"state": oaot.AotHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as mngr:
        mngr.save(1, args=ocp.args.Composite(state=oaot.AotSave(state, fns=fns)))
    with ocp.CheckpointManager(tmp_path, item_handlers={"state": oaot.AotHandler()}) as mngr:
        restored = mngr.restore(1, args=ocp.args.Composite(state=oaot.AotRestore()))["state"]
        again = mngr.restore(1)["state"]
    for found in (restored, again):
        assert programs.digest(found.state) == programs.digest(state)
        require_loaded(found.fns, right, mesh, found.state["params"])


def test_a_handler_registry(tmp_path, state, fns, right, mesh):
    def registry():
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handler = oaot.AotHandler()
        registry.add("state", oaot.AotSave, handler)
        registry.add("state", oaot.AotRestore, handler)
        return registry

    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as mngr:
        mngr.save(1, args=ocp.args.Composite(state=oaot.AotSave(state, fns=fns)))
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as mngr:
        found = mngr.restore(1, args=ocp.args.Composite(state=oaot.AotRestore()))["state"]
    assert programs.digest(found.state) == programs.digest(state)
    require_loaded(found.fns, right, mesh, found.state["params"])


def test_no_handler_given_works_through_the_args_alone(tmp_path, state, fns, right, mesh):
    with ocp.CheckpointManager(tmp_path) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
    with ocp.CheckpointManager(tmp_path) as mngr:
        found = mngr.restore(1, args=oaot.AotRestore())
    require_loaded(found.fns, right, mesh, found.state["params"])
    with ocp.CheckpointManager(tmp_path) as mngr:
        plain = mngr.restore(1)
    assert isinstance(plain, dict) and programs.digest(plain) == programs.digest(state)


def test_executables_as_an_item_of_their_own_beside_a_standard_state(
    tmp_path, state, fns, right, mesh
):
    with ocp.CheckpointManager(tmp_path) as mngr:
        mngr.save(
            1,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), aot=oaot.AotSave(fns=fns)),
        )
    with ocp.CheckpointManager(tmp_path) as mngr:
        found = mngr.restore(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target_of(state)), aot=oaot.AotRestore()
            ),
        )
    assert found["aot"].state is None
    require_loaded(found["aot"].fns, right, mesh, found["state"]["params"])
    with ocp.CheckpointManager(tmp_path) as mngr:  # someone without this package
        plain = mngr.restore(1)
    assert programs.digest(plain["state"]) == programs.digest(state)


def test_old_steps_are_deleted_with_their_executables(tmp_path, state, fns, right, mesh):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=oaot.AotHandler()) as mngr:
        for step in range(5):
            mngr.save(step, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()
        assert mngr.all_steps() == [3, 4]
        found = mngr.restore(4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]
    require_loaded(found.fns, right, mesh, found.state["params"])


def test_item_metadata_is_that_of_the_state(tmp_path, state, fns):
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
        mngr.wait_until_finished()
        metadata = mngr.item_metadata(1)
    tree = getattr(metadata, "tree", metadata)
    assert tree["params"]["w1"].shape == (8, 16)
    assert set(tree) == set(state)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_from_inside_a_running_event_loop(tmp_path, state, fns, right, mesh, asynchronous):
    async def notebook():
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
        with ocp.CheckpointManager(
            tmp_path, options=options, item_handlers=oaot.AotHandler()
        ) as mngr:
            mngr.save(1, args=oaot.AotSave(state, fns=fns))
            mngr.wait_until_finished()
            return mngr.restore(1)

    found = asyncio.run(notebook())
    assert programs.digest(found.state) == programs.digest(state)
    require_loaded(found.fns, right, mesh, found.state["params"])


@pytest.mark.parametrize("make", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_checkpointers_without_a_manager(tmp_path, state, fns, right, mesh, make):
    path = tmp_path / "one"
    with make(oaot.AotHandler()) as checkpointer:
        checkpointer.save(path, args=oaot.AotSave(state, fns=fns))
        if make is ocp.AsyncCheckpointer:
            checkpointer.wait_until_finished()
        found = checkpointer.restore(path, args=oaot.AotRestore())
    assert programs.digest(found.state) == programs.digest(state)
    require_loaded(found.fns, right, mesh, found.state["params"])


# -- readers without this package -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state, fns):
    path = tmp_path_factory.mktemp("saved")
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
    return path


def test_a_plain_manager_reads_the_weights(saved, state):
    with ocp.CheckpointManager(saved) as mngr:
        assert programs.digest(mngr.restore(1)) == programs.digest(state)
        args = ocp.args.StandardRestore(target_of(state))
        assert programs.digest(mngr.restore(1, args=args)) == programs.digest(state)


def test_a_standard_checkpointer_reads_the_weights(saved, state):
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(saved / "1" / "default", target_of(state))
        assert programs.digest(found) == programs.digest(state)
        assert programs.digest(checkpointer.restore(saved / "1/default")) == programs.digest(state)


def test_orbax_v1_reads_the_weights(saved, state):
    found = ocp1.load(saved / "1", checkpointable_name="default")
    assert programs.digest(found) == programs.digest(state)


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_aot" not in path.relative_to(folder).parts
    }


def test_the_files_of_the_state_are_those_of_the_standard_handler(tmp_path, saved, state):
    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state))
    ours, theirs = files_below(saved / "1/default"), files_below(tmp_path / "1/default")
    plain = lambda files: {n: d for n, d in files.items() if n in ("_METADATA", "_sharding")}
    assert plain(ours) == plain(theirs) and plain(ours)
    # How many chunk files OCDBT writes, and their names, are left to chance; everything else has the same name.
    named = lambda files: sorted(n for n in files if "/d/" not in f"/{n}")
    assert named(ours) == named(theirs)


def test_the_item_says_it_is_the_standard_handlers(saved, tmp_path, state):
    import json

    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state))
    read = lambda path: json.loads((path / "1/_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert read(saved) == read(tmp_path)


def test_a_path_without_executables_gives_plain_weights_and_a_report_that_says_so(tmp_path, state):
    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state))
    live = programs.jitted()["predict"]
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        found = mngr.restore(1, args=oaot.AotRestore(target_of(state)))
        bound = mngr.restore(1, args=oaot.AotRestore(target_of(state), fns={"predict": live}))
    assert programs.digest(found.state) == programs.digest(state)
    assert len(found.fns) == 0
    assert "no executables (no _aot folder)" in str(found.fns.report)
    report = bound.fns.report["predict"]
    assert (report.verdict, report.reasons[0].code) == (
        oaot.Verdict.RECOMPILED,
        oaot.ReasonCode.NOT_SAVED,
    )


# -- what a save asks of the training thread --------------------------------------------------------------------------


def test_a_save_blocks_for_no_serialization_and_can_be_followed_by_donation(tmp_path, monkeypatch):
    """Packing waits until the save has returned; what is saved is the state of before the next step."""
    from orbax_aot import functions as functions_lib

    mesh = programs.mesh_of([0, 1, 2, 3])
    step = programs.jitted()["train_step"]
    state = programs.make_state(mesh)
    state, _ = step(state, programs.make_batch(0, mesh))
    before = programs.digest(state)
    pack = functions_lib.Executable.pack
    began = []

    def slow_pack(self, *args, **kwargs):
        began.append(time.monotonic())
        time.sleep(1.0)
        return pack(self, *args, **kwargs)

    monkeypatch.setattr(functions_lib.Executable, "pack", slow_pack)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        start = time.monotonic()
        mngr.save(1, args=oaot.AotSave(state, fns={"train_step": step}))
        blocked = time.monotonic() - start
        state, _ = step(state, programs.make_batch(1, mesh))
        jax.block_until_ready(state)
        mngr.wait_until_finished()
        whole = time.monotonic() - start
        found = mngr.restore(1)
    assert len(began) == 1
    assert whole >= 1.0 > blocked
    assert programs.digest(found.state) == before
    assert found.fns.report["train_step"].verdict is oaot.Verdict.LOADED


def test_what_takes_too_long_is_dropped_with_timeout_and_the_step_commits(tmp_path, monkeypatch):
    from orbax_aot import functions as functions_lib

    f = oaot.jit(lambda x: x + 1)
    f(1.0)
    monkeypatch.setattr(functions_lib.Executable, "pack", lambda *a, **k: time.sleep(20))
    state = {"a": jnp.ones(3)}
    start = time.monotonic()
    handler = oaot.AotHandler(timeout_secs=0.5)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns={"f": f}))
        mngr.wait_until_finished()
        assert time.monotonic() - start < 15
        assert mngr.all_steps() == [1]
        found = mngr.restore(1)
    assert programs.digest(found.state) == programs.digest(state)
    report = found.fns.report["f"]
    assert report.verdict is oaot.Verdict.REFUSED
    assert [r.code for r in report.reasons] == [oaot.ReasonCode.TIMEOUT]


def test_turned_off_by_the_environment_it_saves_and_restores_weights_only(
    tmp_path, monkeypatch, state, fns, saved, right, mesh
):
    monkeypatch.setenv("ORBAX_AOT", "off")
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns=fns))
    assert not list(tmp_path.rglob("_aot"))
    live = programs.jitted()["predict"]
    with ocp.CheckpointManager(saved, item_handlers=oaot.AotHandler()) as mngr:
        found = mngr.restore(1, args=oaot.AotRestore(target_of(state), fns={"predict": live}))
    assert programs.digest(found.state) == programs.digest(state)
    result = found.fns.predict(found.state["params"], programs.make_batch(0, mesh))
    assert programs.digest(result) == right
    report = found.fns.report["predict"]
    assert report.verdict is oaot.Verdict.RECOMPILED
    assert [r.code for r in report.reasons] == [oaot.ReasonCode.DISABLED]

"""What Orbax offers around a handler: other state handlers, managers' options, checkpointers, files that move."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_aot as oaot

LOADED = oaot.Verdict.LOADED


@pytest.fixture
def step():
    function = oaot.jit(lambda state: {**state, "w": state["w"] * 2, "count": state["count"] + 1})
    function(make_state())
    return function


def make_state(count=0):
    return {"w": jnp.arange(8.0), "count": jnp.int32(count)}


def manager(path, handler=None, **options):
    return ocp.CheckpointManager(
        path,
        options=ocp.CheckpointManagerOptions(**options),
        item_handlers=handler or oaot.AotHandler(),
    )


def save(mngr, number, step, **kwargs):
    done = mngr.save(number, args=oaot.AotSave(make_state(number), fns={"step": step}), **kwargs)
    mngr.wait_until_finished()
    return done


def require_whole(restored, count):
    """The state is that of a save, and the function is the saved executable, which runs."""
    assert int(restored.state["count"]) == count
    assert restored.fns.report["step"].verdict is LOADED
    after = restored.fns.step(restored.state)
    np.testing.assert_array_equal(after["w"], np.arange(8.0) * 2)
    assert int(after["count"]) == count + 1


# -- state handlers ---------------------------------------------------------------------------------------------------


def test_a_pytree_handler_takes_a_state_and_gives_it_back(tmp_path, step):
    with manager(tmp_path, oaot.AotHandler(ocp.PyTreeCheckpointHandler())) as mngr:
        save(mngr, 1, step)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, make_state())
        require_whole(mngr.restore(1, args=oaot.AotRestore(target)), 1)
        require_whole(mngr.restore(1, args=oaot.AotRestore()), 1)
    metadata = (tmp_path / "1/_CHECKPOINT_METADATA").read_text()
    assert "PyTreeCheckpointHandler" in metadata and "aot" not in metadata.lower()


def test_a_pytree_handler_gets_its_own_arguments(tmp_path, step):
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), make_state())
    with manager(tmp_path, oaot.AotHandler(ocp.PyTreeCheckpointHandler())) as mngr:
        args = oaot.AotSave(ocp.args.PyTreeSave(make_state(1), save_args), fns={"step": step})
        mngr.save(1, args=args)
        mngr.wait_until_finished()
        args = oaot.AotSave(make_state(2), save_args=save_args, fns={"step": step})
        mngr.save(2, args=args)
        mngr.wait_until_finished()
        for number in (1, 2):
            restore_args = ocp.checkpoint_utils.construct_restore_args(make_state())
            item = ocp.args.PyTreeRestore(make_state(), restore_args=restore_args)
            require_whole(mngr.restore(number, args=oaot.AotRestore(item)), number)


def test_a_state_restored_as_another_dtype_compiles_another_signature(tmp_path, step):
    with manager(tmp_path, oaot.AotHandler(ocp.PyTreeCheckpointHandler())) as mngr:
        save(mngr, 1, step)
        restore_args = {
            "w": ocp.ArrayRestoreArgs(dtype=jnp.bfloat16),
            "count": ocp.ArrayRestoreArgs(dtype=np.int32),
        }
        item = ocp.args.PyTreeRestore(restore_args=restore_args)
        live = oaot.jit(lambda state: {"w": state["w"] * 2, "count": state["count"] + 1})
        state, fns = mngr.restore(1, args=oaot.AotRestore(item, fns={"step": live}))
        assert state["w"].dtype == jnp.bfloat16
        assert fns.step(state)["w"].dtype == jnp.bfloat16
    codes = [reason.code.name for reason in fns.report["step"].reasons]
    assert "SIGNATURE_CHANGED" in codes


def test_without_source_another_dtype_is_refused_by_key_path(tmp_path, step):
    with manager(tmp_path, oaot.AotHandler(ocp.PyTreeCheckpointHandler())) as mngr:
        save(mngr, 1, step)
        restore_args = {
            "w": ocp.ArrayRestoreArgs(dtype=jnp.bfloat16),
            "count": ocp.ArrayRestoreArgs(dtype=np.int32),
        }
        item = ocp.args.PyTreeRestore(restore_args=restore_args)
        state, fns = mngr.restore(1, args=oaot.AotRestore(item))
    with pytest.raises(oaot.SignatureError, match=r"0/w.*bfloat16"):
        fns.step(state)


def test_a_part_of_a_state_is_restored_beside_the_executables(tmp_path, step):
    with manager(tmp_path, oaot.AotHandler(ocp.PyTreeCheckpointHandler())) as mngr:
        save(mngr, 1, step)
        part = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
        item = ocp.args.PyTreeRestore(
            part, restore_args={"w": ocp.ArrayRestoreArgs()}, partial_restore=True
        )
        state, fns = mngr.restore(1, args=oaot.AotRestore(item))
    assert list(state) == ["w"]
    assert fns.report["step"].verdict is LOADED
    after = fns.step({**state, "count": jnp.int32(1)})
    np.testing.assert_array_equal(after["w"], np.arange(8.0) * 2)


class TextHandler(ocp.CheckpointHandler):
    """A handler of someone's own, and no asynchronous one."""

    def save(self, directory, args):
        (epath.Path(directory) / "text").write_text(args.item)

    def restore(self, directory, args=None):
        return (epath.Path(directory) / "text").read_text()


@ocp.args.register_with_handler(TextHandler, for_save=True)
class TextSave(ocp.args.CheckpointArgs):
    def __init__(self, item):
        self.item = item


@ocp.args.register_with_handler(TextHandler, for_restore=True)
class TextRestore(ocp.args.CheckpointArgs):
    def __init__(self, item=None):
        self.item = item


def test_a_handler_of_ones_own_is_wrapped(tmp_path, step):
    with manager(tmp_path, oaot.AotHandler(TextHandler())) as mngr:
        mngr.save(1, args=oaot.AotSave("any text", fns={"step": step}))
        mngr.wait_until_finished()
        state, fns = mngr.restore(1, args=oaot.AotRestore())
    assert state == "any text"
    assert fns.report["step"].verdict is LOADED


def test_random_keys_and_numpy_leaves_come_back_beside_executables(tmp_path):
    state = {"key": jax.random.key(3), "table": np.arange(6).reshape(2, 3), "n": 5}
    draw = oaot.jit(lambda key: jax.random.normal(key, (3,)))
    expected = draw(state["key"])
    with manager(tmp_path) as mngr:
        mngr.save(1, args=oaot.AotSave(state, fns={"draw": draw}))
        mngr.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        for args in (oaot.AotRestore(target), oaot.AotRestore()):
            found, fns = mngr.restore(1, args=args)
            np.testing.assert_array_equal(fns.draw(found["key"]), expected)
            assert isinstance(found["table"], np.ndarray)
            np.testing.assert_array_equal(found["table"], state["table"])
            assert found["n"] == 5


@pytest.mark.parametrize("ocdbt,zarr3", [(True, True), (False, False), (False, True)])
def test_each_format_of_arrays_carries_executables(tmp_path, step, ocdbt, zarr3):
    handler = oaot.AotHandler(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3))
    with manager(tmp_path, handler) as mngr:
        save(mngr, 1, step)
        assert (tmp_path / "1/default/manifest.ocdbt").exists() is ocdbt
        require_whole(mngr.restore(1, args=oaot.AotRestore()), 1)


# -- CheckpointManager ------------------------------------------------------------------------------------------------


def test_the_best_steps_by_metric_keep_their_executables(tmp_path, step):
    with manager(tmp_path, max_to_keep=2, best_fn=lambda m: m["accuracy"]) as mngr:
        for number, accuracy in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.7)):
            save(mngr, number, step, metrics={"accuracy": accuracy})
        assert sorted(mngr.all_steps()) == [2, 4]
        assert mngr.best_step() == 2
        require_whole(mngr.restore(2, args=oaot.AotRestore()), 2)
    assert not (tmp_path / "1").exists()


def test_steps_between_the_save_interval_are_skipped_whole(tmp_path, step):
    with manager(tmp_path, save_interval_steps=2) as mngr:
        assert [bool(save(mngr, n, step)) for n in range(4)] == [True, False, True, False]
        require_whole(mngr.restore(2, args=oaot.AotRestore()), 2)


def test_a_read_only_manager_restores_and_sees_new_steps_on_reload(tmp_path, step):
    with manager(tmp_path) as writer, manager(tmp_path, read_only=True) as reader:
        save(writer, 1, step)
        assert reader.latest_step() is None
        reader.reload()
        require_whole(reader.restore(1, args=oaot.AotRestore()), 1)
        assert not reader.save(2, args=oaot.AotSave(make_state(2), fns={"step": step}))


@pytest.mark.parametrize("folder", [None, "deleted"])
def test_deleting_a_step_takes_its_executables_along(tmp_path, step, folder):
    with manager(tmp_path, todelete_subdir=folder) as mngr:
        save(mngr, 1, step)
        save(mngr, 2, step)
        mngr.delete(1)
        assert mngr.all_steps() == [2]
        require_whole(mngr.restore(2, args=oaot.AotRestore()), 2)
    assert not (tmp_path / "1").exists()
    if folder:
        assert (tmp_path / folder / "1/default/_aot/manifest.json").exists()


@pytest.mark.parametrize(
    "options,name",
    [
        ({"step_prefix": "step"}, "step_7"),
        ({"step_format_fixed_length": 6}, "000007"),
        (
            {
                "step_name_format": ocp.path.step.standard_name_format(
                    step_prefix="run", step_format_fixed_length=4
                )
            },
            "run_0007",
        ),
    ],
)
def test_any_name_of_a_step_folder_will_do(tmp_path, step, options, name):
    with manager(tmp_path, **options) as mngr:
        save(mngr, 7, step)
        require_whole(mngr.restore(7, args=oaot.AotRestore()), 7)
    assert (tmp_path / name / "default/_aot/manifest.json").exists()


def test_one_host_may_load_and_broadcast(tmp_path, step):
    with manager(tmp_path, single_host_load_and_broadcast=True) as mngr:
        save(mngr, 1, step)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, make_state())
        require_whole(mngr.restore(1, args=oaot.AotRestore(target)), 1)


def test_a_synchronous_manager_saves_executables(tmp_path, step):
    with manager(tmp_path, enable_async_checkpointing=False) as mngr:
        mngr.save(1, args=oaot.AotSave(make_state(1), fns={"step": step}))
        require_whole(mngr.restore(1, args=oaot.AotRestore()), 1)


def test_orbax_own_timeout_is_the_state_s(tmp_path, step):
    options = ocp.AsyncOptions(timeout_secs=60)
    with manager(tmp_path, async_options=options) as mngr:
        save(mngr, 1, step)
        require_whole(mngr.restore(1, args=oaot.AotRestore()), 1)


# -- checkpointers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_a_checkpointer_without_manager_carries_executables(tmp_path, step, kind):
    with kind(oaot.AotHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", args=oaot.AotSave(make_state(1), fns={"step": step}))
        if isinstance(checkpointer, ocp.AsyncCheckpointer):
            checkpointer.wait_until_finished()
        require_whole(checkpointer.restore(tmp_path / "x", args=oaot.AotRestore()), 1)
    with ocp.StandardCheckpointer() as plain:
        assert int(plain.restore(tmp_path / "x")["count"]) == 1


def test_checkpoint_utils_iterate_over_steps_that_have_executables(tmp_path, step):
    with manager(tmp_path) as mngr:
        save(mngr, 1, step)
        save(mngr, 2, step)
    found = ocp.checkpoint_utils.checkpoints_iterator(tmp_path, timeout=0, timeout_fn=lambda: True)
    assert next(iter(found)) == 2


# -- files that move --------------------------------------------------------------------------------------------------


def test_a_step_folder_copied_elsewhere_is_whole(tmp_path, step):
    with manager(tmp_path / "a") as mngr:
        save(mngr, 1, step)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a/1", tmp_path / "b/5")
    shutil.rmtree(tmp_path / "a")
    with manager(tmp_path / "b") as mngr:
        require_whole(mngr.restore(5, args=oaot.AotRestore()), 1)


def test_a_renamed_root_is_whole(tmp_path, step):
    with manager(tmp_path / "a") as mngr:
        save(mngr, 1, step)
    (tmp_path / "a").rename(tmp_path / "b")
    with manager(tmp_path / "b") as mngr:
        require_whole(mngr.restore(1, args=oaot.AotRestore()), 1)
        save(mngr, 2, step)
        require_whole(mngr.restore(2, args=oaot.AotRestore()), 2)


def test_state_of_one_root_and_functions_of_another_merge_into_a_third(tmp_path, step):
    other = oaot.jit(lambda state: state["w"].sum())
    other(make_state())
    with manager(tmp_path / "a") as mngr:
        save(mngr, 1, step)
    with manager(tmp_path / "b") as mngr:
        mngr.save(1, args=oaot.AotSave(make_state(9), fns={"total": other}))
    with manager(tmp_path / "a") as a, manager(tmp_path / "b") as b, manager(tmp_path / "c") as c:
        state, fns = a.restore(1, args=oaot.AotRestore())
        _, more = b.restore(1, args=oaot.AotRestore())
        c.save(1, args=oaot.AotSave(state, fns={**fns, **more}))
        c.wait_until_finished()
        merged = c.restore(1, args=oaot.AotRestore())
    assert {n: r.verdict for n, r in merged.fns.report.items()} == {"step": LOADED, "total": LOADED}
    assert float(merged.fns.total(merged.state)) == 28.0
    assert int(merged.fns.step(merged.state)["count"]) == 2

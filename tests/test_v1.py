"""The handlers of `orbax.checkpoint.v1`, and each Orbax API with what the other wrote."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp
import orbax_cases as cases
import plain_orbax_cases as plain
import pytest
from processes import Child

import orbax_aot as oaot
import orbax_aot.v1 as oaot_v1
from orbax_aot import executable as executable_lib

APIS = ("v0", "v1")
LAYOUTS = ("same", "own")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def saved(path):
    with Child() as child:
        return child.run(cases.save_layouts, path)


@pytest.fixture(scope="module")
def other_process(saved):
    """A process that has compiled nothing of what was saved."""
    with Child() as child:
        yield child


@pytest.fixture(scope="module")
def plain_process(path):
    """A process without this package; nothing in it touches what another case read."""
    with Child() as child:
        child.run(plain.save_layouts, path)
        yield child


@pytest.mark.parametrize("writer,layout,reader", list(itertools.product(APIS, LAYOUTS, APIS)))
def test_each_api_restores_what_either_wrote_without_tracing(
    path, saved, other_process, writer, layout, reader
):
    found = other_process.run(cases.load_layout, path, writer, layout, reader)
    assert found["report"] == {"step": {"verdict": "REMAPPED", "reasons": []}}
    assert (found["state"], found["after"]) == (saved["state"], saved["after"])
    assert found["sharded"]
    assert found["traced"] == []
    assert found["tracebacks"] == []
    assert [line.partition(" in ")[0] for line in found["lines"]] == ["INFO step: remapped"]


@pytest.mark.parametrize("writer,reader", list(itertools.product(APIS, APIS)))
def test_each_api_restores_without_the_source_what_either_wrote(
    path, saved, other_process, writer, reader
):
    found = other_process.run(cases.load_layout, path, writer, "same", reader, live=False)
    assert found["report"] == {"step": {"verdict": "REMAPPED", "reasons": []}}
    assert found["after"] == saved["after"]


def test_v1_restores_the_only_item_of_a_v0_manager(path, saved, other_process):
    found = other_process.run(cases.load_default_by_v1, path)
    assert found == {
        "state": saved["state"],
        "report": {"step": {"verdict": "LOADED", "reasons": []}},
    }


@pytest.mark.parametrize(
    "api,target,writer,layout",
    [
        case
        for case in itertools.product(APIS, (False, True), APIS, LAYOUTS)
        # A v0 manager needs to be told how to read what v1 saved without us.
        if case != ("v0", False, "v1", "own")
    ],
)
def test_plain_orbax_reads_the_weights_without_a_warning(
    path, saved, plain_process, api, target, writer, layout
):
    found = plain_process.run(
        plain.read, path, api, f"{writer}_{layout}", cases.LAYOUTS[layout][1], target
    )
    assert found["state"] == saved["state"]
    if not target:
        assert found["items"] == sorted(set(cases.LAYOUTS[layout]))
    # A v0 manager that is told no handlers says so in any case; and it does not know the name that v1 gives a state
    # which it saved without us.
    if (writer, layout) != ("v1", "own"):
        usual = plain_process.run(
            plain.read, path, api, f"plain_{layout}", cases.LAYOUTS[layout][1], target
        )
        assert found["lines"] == usual["lines"]


def test_plain_v1_finds_a_state_under_its_default_name(path, saved, plain_process):
    assert plain_process.run(plain.load_as_v1_does_by_default, path) == saved["state"]


def test_v1_writes_the_handler_names_that_both_apis_know(path, saved):
    names = json.loads((path / "v1_own/7/_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert names["functions"] == (
        "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
    )
    names = json.loads((path / "v1_same/7/_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert names == {
        "model": (
            "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
        )
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_apis_write_the_same_files(path, saved, layout):
    functions = cases.LAYOUTS[layout][0]

    def files(api):
        folder = path / f"{api}_{layout}/7/{functions}"
        return {str(f.relative_to(folder)) for f in folder.rglob("*") if "ocdbt" not in str(f)}

    ours = {f for f in files("v0") if f.startswith(("_aot", "metadata"))}
    assert ours
    assert {f for f in files("v1") if f.startswith(("_aot", "metadata"))} == ours


def test_every_way_to_save_and_load_of_v1_carries_the_executables(tmp_path):
    with Child() as child:
        state = child.run(cases.save_every_way, tmp_path)
    with Child() as child:
        found = child.run(cases.load_every_way, tmp_path)
    assert sorted(found) == ["async", "latest", "step 1", "step 2", "step 3", "sync"]
    for name, one in found.items():
        assert one == {
            "state": state,
            "report": {"step": {"verdict": "LOADED", "reasons": []}},
        }, name


def test_changed_code_is_recompiled_quietly_through_v1(path, saved, other_process):
    found = other_process.run(cases.quiet_recompile, path)
    assert found["report"]["step"]["verdict"] == "RECOMPILED"
    assert found["report"]["step"]["reasons"][0].startswith("CODE_CHANGED")
    assert found["equal"]
    assert found["tracebacks"] == []
    (line,) = found["lines"]
    assert line.startswith("INFO step: recompiled in ")


def test_on_mismatch_raise_leaves_the_state_alone_in_v1(path, saved, other_process):
    found = other_process.run(cases.refuse_before_the_state, path)
    assert "DEVICE_COUNT: saved for 4 devices" in found["error"]
    assert "The state was not touched." in found["error"]
    assert found["opened"] == []


def test_without_aot_restore_v1_gives_what_it_gives_without_this_package(
    path, saved, other_process
):
    found = other_process.run(cases.load_plainly, path)
    assert found["v0_same"] == found["v1_same"] == {"model": "dict"}
    assert found["v1_own"] == {"functions": "dict", "state": "dict"}
    assert found["tree"] == saved["state"]
    assert found["metadata"] == [{"orbax_aot": oaot.__version__, "functions": ["step"]}, [8, 4]]
    assert found["lines"] == []


def test_switched_off_v1_saves_weights_only_and_compiles_as_jit_does(path, saved, other_process):
    found = other_process.run(cases.switched_off, path)
    assert not found["written"]
    assert found["report"]["step"]["reasons"] == ["DISABLED"] or found["report"]["step"]["reasons"][
        0
    ].startswith("DISABLED")
    assert found["after"] == saved["after"]


# -- in this process ---------------------------------------------------------------------------------------------------


def double(state):
    return jax.tree.map(lambda x: x * 2, state)


@pytest.fixture
def step():
    function = oaot.jit(double)
    function({"x": jnp.ones(4)})
    return function


STATE = {"x": np.arange(4, dtype=np.float32)}


def make_state():
    return jax.tree.map(jnp.asarray, STATE)


def load(path, **kwargs):
    return ocp.load_checkpointables(path, {"state": oaot_v1.AotRestore(**kwargs)})["state"]


def test_an_async_save_does_not_wait_for_packing(tmp_path, step, monkeypatch):
    returned = threading.Event()
    pack = oaot.Executable.pack

    def slow_pack(self, *args):
        assert returned.wait(30)
        return pack(self, *args)

    monkeypatch.setattr(oaot.Executable, "pack", slow_pack)
    response = ocp.save_checkpointables_async(
        tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
    )
    returned.set()
    response.result()
    assert load(tmp_path / "x").fns.report["step"].verdict is oaot.Verdict.LOADED


def test_a_slow_executable_does_not_hold_the_weights_back(tmp_path, step, monkeypatch):
    ocp.save_checkpointables(
        tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
    )
    order = []
    weights_are_there = threading.Event()
    original_load = executable_lib.LoadedProgram.load

    def slow_load(*args, **kwargs):
        order.append("executable begun")
        assert weights_are_there.wait(30)
        return original_load(*args, **kwargs)

    monkeypatch.setattr(executable_lib.LoadedProgram, "load", slow_load)
    state, fns = load(tmp_path / "x")
    order.append("weights")
    weights_are_there.set()
    np.testing.assert_array_equal(state["x"], STATE["x"])
    np.testing.assert_array_equal(fns.step(state)["x"], STATE["x"] * 2)
    assert order == ["executable begun", "weights"]
    assert fns.report["step"].verdict is oaot.Verdict.LOADED


def test_executables_that_hang_are_dropped_and_the_checkpoint_commits(tmp_path, step, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(oaot.Executable, "pack", lambda self, *args: never.wait(30))
    ocp.save_checkpointables(
        tmp_path / "x",
        {"state": oaot_v1.AotSave(make_state(), fns={"step": step}, timeout_secs=0.2)},
    )
    never.set()
    state, fns = load(tmp_path / "x")
    np.testing.assert_array_equal(state["x"], STATE["x"])
    assert [r.code.name for r in fns.report["step"].reasons] == ["TIMEOUT"]


def test_executables_that_cannot_be_packed_cost_nothing_else(tmp_path, step, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("no space for executables")

    monkeypatch.setattr(oaot.Executable, "pack", broken)
    ocp.save_checkpointables(
        tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
    )
    state, fns = load(tmp_path / "x")
    np.testing.assert_array_equal(state["x"], STATE["x"])
    (reason,) = fns.report["step"].reasons
    assert str(reason) == "NOT_SERIALIZABLE: RuntimeError: no space for executables"


def test_a_state_that_cannot_be_saved_raises_as_orbax_does(tmp_path, step):
    with pytest.raises(Exception, match="leaf types are not registered"):
        ocp.save_checkpointables(
            tmp_path / "x", {"state": oaot_v1.AotSave({"x": object()}, fns={"step": step})}
        )


def test_v1_works_where_an_event_loop_runs_already_as_in_a_notebook(tmp_path, step):
    async def cell():
        ocp.save_checkpointables(
            tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
        )
        return load(tmp_path / "x", fns={"step": oaot.jit(double)})

    state, fns = asyncio.run(cell())
    np.testing.assert_array_equal(fns.step(state)["x"], STATE["x"] * 2)
    assert fns.report["step"].verdict is oaot.Verdict.LOADED


def test_weak_types_and_leaves_that_are_no_arrays_come_back_through_v1(tmp_path, step):
    state = {"weak": jnp.asarray(1.0) * 1, "numpy": np.arange(3.0), "number": 3, "text": "a"}
    assert state["weak"].weak_type
    ocp.save_checkpointables(tmp_path / "x", {"state": oaot_v1.AotSave(state, fns={"step": step})})
    found = load(tmp_path / "x").state
    assert found["weak"].weak_type
    assert isinstance(found["numpy"], np.ndarray)
    np.testing.assert_array_equal(found["numpy"], state["numpy"])
    assert (found["number"], found["text"]) == (3, "a")


def test_a_registry_of_ones_own_takes_the_handlers_once(tmp_path, step):
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler)
    assert oaot_v1.add_handlers(registry) is registry
    assert len(oaot_v1.add_handlers(registry).get_all_entries()) == 3
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(
            tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
        )
        assert load(tmp_path / "x").fns.report["step"].verdict is oaot.Verdict.LOADED


def test_a_registry_without_the_handlers_is_named(tmp_path, step):
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for handler, name in ocp.handlers.global_registry().get_all_entries():
        if handler not in (oaot_v1.AotHandler, oaot_v1.AotFunctionsHandler):
            registry.add(handler, checkpointable_name=name)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context, pytest.raises(TypeError) as error:
        ocp.save_checkpointables(
            tmp_path / "x", {"model": oaot_v1.AotSave(make_state(), fns={"step": step})}
        )
    assert str(error.value) == (
        "The handlers of orbax_aot.v1 are not in this Context's registry: import orbax_aot.v1 before the Context is "
        "made, or pass the registry to orbax_aot.v1.add_handlers."
    )


def test_arguments_of_the_other_api_are_named(tmp_path, step):
    with pytest.raises(TypeError, match="not save arguments of"):
        oaot_v1.AotSave(ocp_v0.args.StandardSave({}), fns={"step": step})
    ocp.save_checkpointables(
        tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
    )
    with pytest.raises(TypeError, match="not restore arguments of"):
        load(tmp_path / "x", item=ocp_v0.args.StandardRestore())
    with pytest.raises(TypeError, match="takes a mapping from names to AotFunction"):
        oaot_v1.AotSave({}, fns=[step])


def test_a_context_with_zarr3_and_without_ocdbt_carries_executables(tmp_path, step):
    context = ocp.Context()
    context.array_options.saving.use_ocdbt = False
    context.array_options.saving.use_zarr3 = True
    with context:
        ocp.save_checkpointables(
            tmp_path / "x", {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
        )
    assert not (tmp_path / "x/state/manifest.ocdbt").exists()
    state, fns = load(tmp_path / "x")
    np.testing.assert_array_equal(fns.step(state)["x"], STATE["x"] * 2)
    assert fns.report["step"].verdict is oaot.Verdict.LOADED


def test_restoring_into_a_function_again_and_again_saves_each_executable_once(tmp_path, step):
    for i in range(3):
        ocp.save_checkpointables(
            tmp_path / str(i), {"state": oaot_v1.AotSave(make_state(), fns={"step": step})}
        )
        load(tmp_path / str(i), fns={"step": step})
    assert sorted(p.name for p in (tmp_path / "2/state/_aot/step").iterdir()) == ["0"]

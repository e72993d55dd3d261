"""Calls of a function without its source: which trees it takes, what it gives back, what it says to the wrong ones."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_aot as oaot
from orbax_aot.errors import SignatureError

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SavedState:
    """What the training used; those who serve have another class, or none."""

    step: Any
    params: Any
    unused: Any = dataclasses.field(default="adam", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OtherState:
    params: Any
    step: Any


class StateTuple(NamedTuple):
    params: Any
    step: Any


def train(state, batch):
    gradient = batch["x"].T @ batch["y"]
    params = {"b": state.params["b"] + batch["y"].sum(0), "w": state.params["w"] - gradient}
    return SavedState(state.step + 1, params), {
        "loss": gradient.sum(),
        "list": [batch["x"], (state.step,)],
    }


def arrays():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {
        "w": jax.device_put(normal(8, 4), on(None, "model")),
        "b": jax.device_put(normal(4), on()),
    }
    batch = {
        "x": jax.device_put(normal(2, 8), on("data")),
        "y": jax.device_put(normal(2, 4), on("data")),
    }
    return jax.device_put(jnp.int32(7), on()), params, batch


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """The restored function, and what the original gives."""
    path = tmp_path_factory.mktemp("calls")
    step, params, batch = arrays()
    function = oaot.jit(train)
    expected = function(SavedState(step, params), batch)
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"step": step, "params": params}, fns={"train": function}))
        mngr.wait_until_finished()
        return mngr.restore(1, args=oaot.AotRestore()).fns.train, expected


TREES = {
    "dict": lambda step, params: {"step": step, "params": params},
    "dict in another order": lambda step, params: {
        "params": dict(reversed(params.items())),
        "step": step,
    },
    "OrderedDict": lambda step, params: collections.OrderedDict(params=params, step=step),
    "dataclass": lambda step, params: SavedState(step, params),
    "dataclass in another order": lambda step, params: OtherState(params, step),
    "NamedTuple": lambda step, params: StateTuple(params, step),
}


@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_the_same_paths_is_taken_and_given_back(restored, tree):
    function, (expected, metrics) = restored
    step, params, batch = arrays()
    given = TREES[tree](step, params)
    for _ in range(2):
        state, found = function(given, batch)
    assert jax.tree.structure(state) == jax.tree.structure(given)
    assert type(state) is type(given)
    get = state.get if isinstance(state, dict) else lambda name: getattr(state, name)
    np.testing.assert_array_equal(get("step"), expected.step)
    assert sorted(get("params")) == ["b", "w"]
    for name in ("b", "w"):
        np.testing.assert_array_equal(get("params")[name], expected.params[name])
        assert get("params")[name].sharding == expected.params[name].sharding
    assert sorted(found) == ["list", "loss"]
    assert isinstance(found["list"], list) and isinstance(found["list"][1], tuple)
    np.testing.assert_array_equal(found["loss"], metrics["loss"])
    np.testing.assert_array_equal(found["list"][0], metrics["list"][0])


def test_arguments_and_results_may_lie_in_different_trees(restored):
    """Each call finds its own; none spoils what the next one gets."""
    function, _ = restored
    step, params, batch = arrays()
    for tree in (*TREES, *TREES):
        given = TREES[tree](step, params)
        assert type(function(given, batch)[0]) is type(given)


def test_numpy_arrays_are_taken(restored):
    function, (expected, _) = restored
    given = jax.tree.map(np.asarray, TREES["dict"](*arrays()[:2]))
    state, _ = function(given, jax.tree.map(np.asarray, arrays()[2]))
    np.testing.assert_array_equal(state["params"]["w"], expected.params["w"])
    assert state["params"]["w"].sharding.is_equivalent_to(expected.params["w"].sharding, 2)


# -- what does not match ---------------------------------------------------------------------------------------------


def refusal(function, *args, **kwargs):
    with pytest.raises(SignatureError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


HEAD = "train: the arguments match none of 1 saved signatures:\n  "
LEAVES = "The arguments do not have the leaves of the saved signature. "


def test_missing_extra_and_mismatched_leaves_are_all_listed(restored):
    function, _ = restored
    step, params, batch = arrays()
    given = {"step": step.astype(jnp.float32), "params": {"w": params["w"][:, :2], "c": 1}}
    assert refusal(function, given, {**batch, "z": 0}) == (
        HEAD + LEAVES + "missing: 0/params/b; extra: 0/params/c, 1/z; "
        "0/step: saved as int32[], now float32[]; "
        "0/params/w: saved as float32[8, 4], now float32[8, 2]"
    )


def test_a_missing_argument_is_a_missing_leaf(restored):
    function, _ = restored
    step, params, _ = arrays()
    assert refusal(function, {"step": step, "params": params}) == (
        HEAD + LEAVES + "missing: 1/x, 1/y"
    )


def test_a_positional_argument_is_not_the_keyword_of_its_name(restored):
    function, _ = restored
    step, params, batch = arrays()
    assert refusal(function, {"step": step, "params": params}, batch=batch) == (
        HEAD + LEAVES + "missing: 1/x, 1/y; extra: batch/x, batch/y"
    )


def test_shapes_and_types_are_told_by_path(restored):
    function, _ = restored
    step, params, batch = arrays()
    given = {"step": step, "params": params}
    other = {"x": batch["x"].astype(jnp.bfloat16), "y": jnp.zeros((2, 5), jnp.float32)}
    assert refusal(function, given, other) == (
        HEAD + "1/x: saved as float32[2, 8], now bfloat16[2, 8]; "
        "1/y: saved as float32[2, 4], now float32[2, 5]"
    )


def test_arrays_on_other_devices_are_told_by_path(restored):
    function, _ = restored
    step, params, batch = arrays()
    params["w"] = jax.device_put(params["w"], on("data"))
    params["b"] = jax.device_put(params["b"], jax.devices()[3])
    everywhere = "data=2xmodel=4 (devices 0,1,2,3,4,5,6,7)"
    assert refusal(function, {"step": step, "params": params}, batch) == (
        HEAD
        + f"0/params/b: expected on {P()} over {everywhere}, got on SingleDeviceSharding (devices 3); "
        f"0/params/w: expected on {P(None, 'model')} over {everywhere}, got on {P('data')} over {everywhere}"
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A function of eight leaves, called in two ways."""
    path = tmp_path_factory.mktemp("wide")
    function = oaot.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    for length in (2, 3):
        function({f"leaf{i}": np.zeros(length, np.float32) for i in range(8)})
    with ocp.CheckpointManager(path, item_handlers=oaot.AotHandler()) as mngr:
        mngr.save(1, args=oaot.AotSave({"x": np.zeros(1)}, fns={"wide": function}))
        mngr.wait_until_finished()
        return mngr.restore(1, args=oaot.AotRestore()).fns.wide


def test_of_many_differences_the_first_five_and_their_number_are_told(wide):
    types = lambda saved: "; ".join(
        f"0/leaf{i}: saved as float32[{saved}], now int32[4]" for i in range(5)
    )
    assert refusal(wide, {f"leaf{i}": np.zeros(4, np.int32) for i in range(8)}) == (
        "wide: the arguments match none of 2 saved signatures:\n"
        f"  {types(2)}; and 3 more\n"
        f"  {types(3)}; and 3 more"
    )


def test_of_many_missing_and_extra_leaves_the_first_five_and_their_number_are_told(wide):
    assert refusal(wide, {f"other{i}": np.zeros(4, np.int32) for i in range(8)}) == (
        "wide: the arguments match none of 2 saved signatures:\n"
        f"  {LEAVES}missing: 0/leaf0, 0/leaf1, 0/leaf2, 0/leaf3, 0/leaf4 and 3 more; "
        "extra: 0/other0, 0/other1, 0/other2, 0/other3, 0/other4 and 3 more"
    )


def test_each_signature_is_found_by_its_shapes(wide):
    for length in (2, 3, 2):
        found = wide({f"leaf{i}": np.zeros(length, np.float32) for i in range(8)})
        assert {x.shape for x in found.values()} == {(length,)}


def test_a_call_that_does_not_match_leaves_the_function_usable(wide):
    refusal(wide, {"leaf0": 1})
    assert len(wide({f"leaf{i}": np.zeros(2, np.float32) for i in range(8)})) == 8


def test_transforming_or_tracing_it_is_refused(wide):
    with pytest.raises(TypeError) as caught:
        jax.jit(wide)({f"leaf{i}": np.zeros(2, np.float32) for i in range(8)})
    assert str(caught.value) == (
        "wide: a compiled function cannot be transformed or called inside another jit; pass the live function to "
        "AotRestore(fns={...})."
    )

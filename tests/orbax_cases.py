"""What the processes of the tests of both Orbax APIs do. Each function runs in a child and returns JSON."""

from __future__ import annotations

import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from watching import watching

import orbax_aot as oaot
import orbax_aot.v1 as oaot_v1


def mesh_of(ids=(0, 1, 2, 3)):
    devices = jax.devices()
    return Mesh(np.array([devices[i] for i in ids]).reshape(2, 2), ("data", "model"))


def make_state(mesh):
    state = {
        "params": {"w": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), "b": np.ones(4)},
        "step": np.int32(0),
    }
    specs = {"params": {"w": P("data", "model"), "b": P("model")}, "step": P()}
    return jax.tree.map(
        lambda x, s: jax.device_put(jnp.asarray(x), NamedSharding(mesh, s)), state, specs
    )


def make_batch(mesh):
    batch = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 64
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def train_step(state, batch):
    def loss(params):
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"] + params["b"]) - 0.5))

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "step": state["step"] + 1}, value


def changed_train_step(state, batch):
    state, value = train_step(state, batch)
    return state, value * 2


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def digest(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def about(fns):
    return {
        name: {"verdict": r.verdict.name, "reasons": [str(reason) for reason in r.reasons]}
        for name, r in fns.report.items()
    }


# -- each layout written by each API -----------------------------------------------------------------------------------

# Layout: the item with the executables, the item with the state.
LAYOUTS = {"same": ("model", "model"), "own": ("functions", "state")}


def save_layouts(path):
    """Writes each layout through each API; returns what the state and a step from it are."""
    mesh = mesh_of()
    step = oaot.jit(train_step)
    state, batch = make_state(mesh), make_batch(mesh)
    after, loss = step(state, batch)
    for layout in LAYOUTS:
        with v0_manager(f"{path}/v0_{layout}", layout) as manager:
            manager.save(7, args=ocp_v0.args.Composite(**v0_save_args(layout, state, step)))
            manager.wait_until_finished()
        with ocp.training.Checkpointer(f"{path}/v1_{layout}") as checkpointer:
            checkpointer.save_checkpointables(7, v1_save_args(layout, state, step))
    with ocp_v0.CheckpointManager(f"{path}/v0_default", item_handlers=oaot.AotHandler()) as manager:
        manager.save(7, args=oaot.AotSave(state, fns={"step": step}))
        manager.wait_until_finished()
    ocp.save_checkpointables(f"{path}/v1_state/7", v1_save_args("same", state, step, "state"))
    return {"state": digest(state), "after": digest(after), "loss": float(loss)}


def v0_manager(path, layout):
    handlers = {"model": oaot.AotHandler()}
    if layout == "own":
        handlers = {
            "functions": oaot.AotHandler(),
            "state": ocp_v0.StandardCheckpointHandler(),
        }
    return ocp_v0.CheckpointManager(path, item_handlers=handlers)


def v0_save_args(layout, state, step):
    if layout == "same":
        return {"model": oaot.AotSave(state, fns={"step": step})}
    return {
        "functions": oaot.AotSave(fns={"step": step}),
        "state": ocp_v0.args.StandardSave(state),
    }


def v1_save_args(layout, state, step, name="model"):
    if layout == "same":
        return {name: oaot_v1.AotSave(state, fns={"step": step})}
    return {"functions": oaot_v1.AotSave(fns={"step": step}), "state": state}


def load_v0(path, layout, args, target):
    functions, states = LAYOUTS[layout]
    asked = {functions: args}
    if layout == "own":
        asked = {functions: args, states: ocp_v0.args.StandardRestore(target)}
    with v0_manager(path, layout) as manager:
        loaded = manager.restore(7, args=ocp_v0.args.Composite(**asked))
    state = loaded[functions].state if layout == "same" else loaded[states]
    return state, loaded[functions].fns


def load_v1(path, layout, args, target):
    functions, states = LAYOUTS[layout]
    asked = {functions: args, states: target} if layout == "own" else {functions: args}
    loaded = ocp.load_checkpointables(f"{path}/7", asked)
    state = loaded[functions].state if layout == "same" else loaded[states]
    return state, loaded[functions].fns


def load_layout(path, writer, layout, reader, live=True, ids=(4, 5, 6, 7)):
    """Restores what `writer` wrote by `reader`, on other devices, and takes a step."""
    mesh = mesh_of(ids)
    target = abstract(make_state(mesh))
    fns = {"step": oaot.jit(train_step)} if live else ["step"]
    load = {"v0": load_v0, "v1": load_v1}[reader]
    args = oaot.AotRestore(target if layout == "same" else None, fns=fns, mesh=mesh)
    with watching() as watched:
        state, restored = load(f"{path}/{writer}_{layout}", layout, args, target)
        found = {"state": digest(state), "sharded": is_sharded_as(state, target)}
        try:
            after, loss = restored.step(state, make_batch(mesh))
            found |= {"after": digest(after), "loss": float(loss)}
        except oaot.IncompatibleExecutableError as e:
            found |= {"after": None, "loss": None, "error": str(e)}
        found["report"] = about(restored)
    return found | {
        "traced": watched.work("train_step"),
        "lines": watched.lines(),
        "tracebacks": watched.tracebacks(),
    }


def load_default_by_v1(path):
    loaded = ocp.load_checkpointables(
        f"{path}/v0_default/7", {"default": oaot_v1.AotRestore(fns={"step": oaot.jit(train_step)})}
    )
    return {"state": digest(loaded["default"].state), "report": about(loaded["default"].fns)}


def is_sharded_as(state, target):
    return all(
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True)
    )


# -- what v1 saves and loads, every way --------------------------------------------------------------------------------


def save_every_way(path):
    """Saves by each function of v1 that saves, and loads by each that loads; returns reports and digests."""
    mesh = mesh_of()
    step = oaot.jit(train_step)
    state, batch = make_state(mesh), make_batch(mesh)
    step(state, batch)
    save = lambda: {"state": oaot_v1.AotSave(state, fns={"step": step})}
    ocp.save_checkpointables(f"{path}/sync", save())
    ocp.save_checkpointables_async(f"{path}/async", save()).result()
    with ocp.training.Checkpointer(f"{path}/steps") as checkpointer:
        checkpointer.save_checkpointables(1, save())
        checkpointer.save_checkpointables_async(2, save()).result()
        checkpointer.save_checkpointables_async(3, save())  # waited for on leaving
    return digest(state)


def load_every_way(path):
    found = {}

    def load(name, function, *args):
        asked = {"state": oaot_v1.AotRestore(fns={"step": oaot.jit(train_step)})}
        state, fns = function(*args, asked)["state"]
        found[name] = {"state": digest(state), "report": about(fns)}

    load("sync", ocp.load_checkpointables, f"{path}/sync")
    load("async", ocp.load_checkpointables, f"{path}/async")
    with ocp.training.Checkpointer(f"{path}/steps") as checkpointer:
        for step in (1, 2, 3):
            load(f"step {step}", checkpointer.load_checkpointables, step)
        load("latest", checkpointer.load_checkpointables, None)
    return found


def quiet_recompile(path):
    """Loads the same step with changed code; returns what was logged and what the function does."""
    mesh = mesh_of()
    target = abstract(make_state(mesh))
    live = oaot.jit(changed_train_step)
    with watching() as watched:
        state, fns = ocp.load_checkpointables(
            f"{path}/v1_same/7", {"model": oaot_v1.AotRestore(target, fns={"step": live})}
        )["model"]
        _, value = fns.step(state, make_batch(mesh))
        _, expected = jax.jit(changed_train_step)(state, make_batch(mesh))
    return {
        "report": about(fns),
        "lines": watched.lines(),
        "tracebacks": watched.tracebacks(),
        "equal": float(value) == float(expected),
    }


def refuse_before_the_state(path):
    """Loads for twice the devices with `on_mismatch="raise"`; returns the error, and whether the state was opened."""
    opened = []
    handler = ocp.handlers.PyTreeHandler
    original = handler.load

    async def load(self, directory, abstract_checkpointable=None):
        opened.append(str(directory))
        return await original(self, directory, abstract_checkpointable)

    handler.load = load
    try:
        ocp.load_checkpointables(
            f"{path}/v1_same/7",
            {
                "model": oaot_v1.AotRestore(
                    fns={"step": oaot.jit(train_step)},
                    mesh=Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model")),
                    on_mismatch="raise",
                )
            },
        )
        return {"error": None, "opened": opened}
    except oaot.IncompatibleExecutableError as e:
        return {"error": str(e), "opened": opened}
    finally:
        handler.load = original


def load_plainly(path):
    """Loads without `AotRestore`, this package imported: by no target, by a tree, and the metadata."""
    found = {}
    with watching() as watched:
        for name in ("v0_same", "v1_same", "v1_own"):
            loaded = ocp.load_checkpointables(f"{path}/{name}/7")
            found[name] = {k: type(v).__name__ for k, v in sorted(loaded.items())}
        target = abstract(make_state(mesh_of()))
        loaded = ocp.load_checkpointables(f"{path}/v1_same/7", {"model": target})
        metadata = ocp.checkpointables_metadata(f"{path}/v1_own/7").metadata
    found["tree"] = digest(loaded["model"])
    found["metadata"] = [metadata["functions"], list(metadata["state"]["params"]["w"].shape)]
    return found | {"lines": watched.lines()}


def switched_off(path):
    """Saves and loads with `ORBAX_AOT=off`."""
    mesh = mesh_of()
    step = oaot.jit(train_step)
    state = make_state(mesh)
    step(state, make_batch(mesh))
    os.environ["ORBAX_AOT"] = "off"
    try:
        ocp.save_checkpointables(
            f"{path}/off", {"state": oaot_v1.AotSave(state, fns={"step": step})}
        )
        written = os.path.exists(f"{path}/off/state/_aot")
        loaded = ocp.load_checkpointables(
            f"{path}/v1_same/7", {"model": oaot_v1.AotRestore(fns={"step": oaot.jit(train_step)})}
        )["model"]
        after, _ = loaded.fns.step(loaded.state, make_batch(mesh))
        return {"written": written, "report": about(loaded.fns), "after": digest(after)}
    finally:
        del os.environ["ORBAX_AOT"]

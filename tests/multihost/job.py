"""One process of a job: `python job.py RANK COUNT PORT DEVICES FOLDER SCENARIO…`; prints one line of JSON for each.

Scenarios run one after another in the same processes, each with functions of its own.
"""

import json
import os
import sys

rank, count, port, devices, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import orbax_aot as oaot  # noqa: E402
from orbax_aot import store  # noqa: E402

mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))


def place(array, spec):
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


w = place(np.random.RandomState(0).randn(16, 8).astype("f"), P(None, "model"))
x = place(np.random.RandomState(1).randn(8, 16).astype("f"), P("data"))


def make_step(scale):
    def step(w, x):
        y = jnp.tanh(x @ w) * scale
        return w - 0.01 * (x.T @ y), (y**2).sum()

    return oaot.jit(step)


def save():
    step = make_step(2.0)
    state = w
    losses = []
    with ocp.CheckpointManager(folder, item_handlers=oaot.AotHandler()) as manager:
        for i in range(4):
            if i == 2:
                manager.save(2, args=oaot.AotSave({"w": state}, fns={"step": step}))
                manager.wait_until_finished()
            state, loss = step(state, x)
            losses.append(float(loss))
    return {"losses": losses[2:]}


def restore(scale=2.0, live=True, timeout_secs=60.0):
    step = make_step(scale)
    target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
    fns = {"step": step} if live else ["step"]
    handler = oaot.AotHandler(timeout_secs=timeout_secs)
    with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
        state, functions = manager.restore(2, args=oaot.AotRestore(target, fns=fns))
    restored = np.asarray(jax.device_get(state["w"].addressable_shards[0].data)).sum()
    result = {"restored": float(restored), "losses": []}
    try:
        state = state["w"]
        for _ in range(2):
            state, loss = functions.step(state, x)
            result["losses"].append(float(loss))
    except oaot.IncompatibleExecutableError as e:
        result["refused"] = str(e)
    report = functions.report["step"]
    return {
        **result,
        "verdict": report.verdict.name,
        "reasons": [r.code.name for r in report.reasons],
        "texts": [str(r) for r in report.reasons],
    }


def with_broken(name, **options):
    """Restores while this process's reads of the store fail."""
    original = getattr(store.Store, name)

    def broken(*_):
        raise oaot.CorruptArtifactError("bad disk")

    setattr(store.Store, name, broken)
    try:
        return restore(**options)
    finally:
        setattr(store.Store, name, original)


def without_asking():
    """Restores as a process that knows nothing of this package, and runs the plain function."""
    target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
    with ocp.CheckpointManager(folder) as manager:
        state = manager.restore(2, args=ocp.args.StandardRestore(target))
    step, state = make_step(2.0), state["w"]
    losses = []
    for _ in range(2):
        state, loss = step(state, x)
        losses.append(float(loss))
    return {"losses": losses, "verdict": "none"}


SCENARIOS = {
    "save": save,
    "same": restore,
    "corrupt": lambda: with_broken("read") if rank == 1 else restore(),
    "blind": lambda: with_broken("open_manifest") if rank == 1 else restore(),
    "changed": lambda: restore(scale=3.0 if rank == 1 else 2.0),
    "nosource": lambda: restore(live=False),
    "one_nosource": lambda: restore(live=rank == 0),
    "one_nosource_other_corrupt": lambda: with_broken("read") if rank == 0 else restore(live=False),
    "missing": lambda: without_asking() if rank == 1 else restore(timeout_secs=3.0),
}

for name in sys.argv[6:]:
    print("RESULT", json.dumps({"scenario": name, **SCENARIOS[name]()}), flush=True)
jax.block_until_ready((w, x))

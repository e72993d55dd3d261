"""Reading checkpoints with both Orbax APIs where `orbax_aot` has never been imported."""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(level=logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def digest(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def read(path, api, checkpoint, states, target):
    """Returns digest of the state and what was logged; with a target of plain arrays, or with none."""
    lines = _Lines()
    logging.getLogger("absl").addHandler(lines)
    abstract = None
    if target:
        abstract = {
            "params": {
                "b": jax.ShapeDtypeStruct((4,), np.float32),
                "w": jax.ShapeDtypeStruct((8, 4), np.float32),
            },
            "step": jax.ShapeDtypeStruct((), np.int32),
        }
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if api == "v1":
            asked = {states: abstract} if target else None
            loaded = ocp.load_checkpointables(f"{path}/{checkpoint}/7", asked)
        else:
            with ocp_v0.CheckpointManager(f"{path}/{checkpoint}") as manager:
                args = None
                if target:
                    args = ocp_v0.args.Composite(**{states: ocp_v0.args.StandardRestore(abstract)})
                loaded = manager.restore(7, args=args)
    logging.getLogger("absl").removeHandler(lines)
    assert "orbax_aot" not in sys.modules
    return {"items": sorted(loaded), "state": digest(loaded[states]), "lines": lines.lines}


def save_layouts(path):
    """Writes by v0 what the layouts would be without executables."""
    state = {"params": {"b": np.ones(4), "w": np.ones((8, 4))}, "step": np.int32(0)}
    standard, json = ocp_v0.args.StandardSave(state), ocp_v0.args.JsonSave({"functions": []})
    for layout, items in {
        "same": {"model": standard},
        "own": {"functions": json, "state": standard},
    }.items():
        with ocp_v0.CheckpointManager(f"{path}/plain_{layout}") as manager:
            manager.save(7, args=ocp_v0.args.Composite(**items))


def load_as_v1_does_by_default(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = ocp.load(f"{path}/v1_state/7")
    assert "orbax_aot" not in sys.modules
    return digest(state)

"""What Orbax does not keep of the state's arrays, and where they belong when no target says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from orbax_aot import manifest as m
from orbax_aot import trees
from orbax_aot._jax import values


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Types and shardings of a state's leaves, without the arrays. `leaves` are flat, in the order of `treedef`."""

    treedef: Any
    leaves: tuple[tuple[bool, Any] | None, ...]  # (weak type, sharding or None); None: no jax.Array


def take_snapshot(item: Any) -> Snapshot | None:
    """Notes what is needed of a state. Runs on the training thread; costs about a microsecond a leaf."""
    if item is None or not _is_tree(item):
        return None
    leaves, treedef = jax.tree.flatten(item)
    return Snapshot(
        treedef,
        tuple((x.aval.weak_type, x.sharding) if isinstance(x, jax.Array) else None for x in leaves),
    )


def _is_tree(item: Any) -> bool:
    return not isinstance(item, _args_class())


def _args_class() -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.CheckpointArgs


def describe(snapshot: Snapshot | None, tables: m.Tables) -> dict[str, m.StateLeaf]:
    """Describes a state for the manifest, by key path."""
    if snapshot is None:
        return {}
    encoders: dict[Any, values.Encoder] = {}
    described = {}
    paths = trees.leaf_paths(trees.dummy(snapshot.treedef))
    for path, leaf in zip(paths, snapshot.leaves, strict=True):
        if leaf is None:
            continue
        weak, sharding = leaf
        try:
            index = _describe_sharding(sharding, tables, encoders)
        except Exception:  # a sharding that cannot be told is left to the target
            index = None
        described[path] = m.StateLeaf(sharding=index, weak_type=bool(weak))
    return described


def _describe_sharding(
    sharding: Any, tables: m.Tables, encoders: dict[Any, values.Encoder]
) -> int | None:
    """Describes a sharding with positions along its own mesh, so that only shape and axes count."""
    if isinstance(sharding, NamedSharding):
        key = sharding.mesh
        devices = list(cast(Any, sharding.mesh).devices.flat)
    elif isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        key, devices = device, [device]
    else:
        return None
    if key not in encoders:
        encoders[key] = values.Encoder(tables, {d: i for i, d in enumerate(devices)})
    return encoders[key].sharding(sharding)


def single_device_of(item: Any) -> Any:
    """Returns the device that all placed leaves of a target lie on, if it is one; else None."""
    devices: set[Any] = set()
    if item is None or not _is_tree(item):
        return None
    for leaf in jax.tree.leaves(item):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and hasattr(sharding, "device_set"):
            devices |= set(sharding.device_set)
            if len(devices) > 1:
                return None
    return devices.pop() if devices else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A function as it will run here: the saved shardings of `variant`, on `devices`, or adapted to `mesh`.

    `devices` are in the order of the device assignment; with `mesh` the program is rebuilt there.
    """

    signature: m.Signature
    variant: m.Variant
    devices: tuple[Any, ...] = ()
    mesh: jax.sharding.Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Placements:
    """Where arrays can go: what the caller asked for, and the programs that will take them.

    `fallback` is all devices.
    """

    mesh: jax.sharding.Mesh | None
    devices: tuple[Any, ...] | None
    programs: tuple[Program, ...]
    fallback: tuple[Any, ...]


def make_target(metadata: Any, body: m.Body, placements: Placements) -> Any:
    """Makes a target of the checkpoint's metadata, with arrays where the programs expect them.

    An array that no program takes goes where it was when saved: to the mesh of this job that stands for the saved
    one, as far as its sizes divide, else to one device.
    """
    meshes: dict[int, jax.sharding.Mesh | None] = {}
    one = _one_device(placements)
    expected = _expected_shardings(body, placements)

    def place(path: Any, leaf: Any) -> Any:
        name = trees.join(path)
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        saved = body.state.get(name)
        if type(leaf).__name__ != "ArrayMetadata" or shape is None or dtype is None:
            return _plain_target(leaf)
        if saved is None:  # it was saved as a numpy array
            return np.empty(shape, dtype)
        sharding = None
        if saved.sharding is not None:
            sharding = _place(body, saved.sharding, meshes, placements, tuple(shape), one)
        wanted = expected.get(name, [])
        if wanted and sharding not in wanted:
            sharding = wanted[0]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or SingleDeviceSharding(one))

    tree = getattr(metadata, "tree", metadata)
    return jax.tree_util.tree_map_with_path(place, tree)


def _expected_shardings(body: m.Body, placements: Placements) -> dict[str, list[Any]]:
    """Returns where programs expect the arrays of the state, by the state's paths; one entry for each program.

    A program takes the whole state as one argument, or a part of it such as the parameters; the whole goes first.
    """
    whole: dict[str, list[Any]] = {}
    part: dict[str, list[Any]] = {}
    parts_of: dict[str, list[str]] = {}
    for path in body.state:
        parts_of.setdefault(path.partition("/")[2], []).append(path)
    for program in placements.programs:
        for leaf_path, sharding in _input_shardings(body, program):
            below = leaf_path.partition("/")[2]
            if below in body.state:
                whole.setdefault(below, []).append(sharding)
            elif len(parts_of.get(below, ())) == 1:
                part.setdefault(parts_of[below][0], []).append(sharding)
    return {**part, **whole}


def _input_shardings(body: m.Body, program: Program) -> list[tuple[str, Any]]:
    """Returns the path and the sharding here of each input a program uses, where that can be told."""
    decoder = values.Decoder(body, program.devices)
    found = []
    for index, sharding_index in zip(
        program.variant.kept, program.variant.in_shardings, strict=True
    ):
        i = index - len(program.variant.constants)
        if i < 0 or sharding_index is None:
            continue
        leaf = program.signature.inputs[i]
        saved = body.shardings[sharding_index]
        if program.mesh is not None:
            if saved.mesh is None:
                continue
            spec = _fitting_spec(values.make_spec(saved), program.mesh, leaf.shape)
            sharding = NamedSharding(program.mesh, spec, memory_kind=saved.memory)
        elif saved.mesh is not None or saved.device is not None:
            sharding = decoder.sharding(sharding_index)
        else:
            continue
        found.append((leaf.path, sharding))
    return found


def _plain_target(leaf: Any) -> Any:
    """Returns a target for a leaf that is no array: a number or a string."""
    if type(leaf).__name__ == "ScalarMetadata":
        return np.dtype(leaf.dtype).type(0).item()
    if type(leaf).__name__ == "StringMetadata":
        return ""
    return leaf


def _one_device(placements: Placements) -> Any:
    if placements.devices:
        return placements.devices[0]
    if placements.mesh is not None:
        return placements.mesh.devices.flat[0]
    for program in placements.programs:
        if len(program.devices) == 1:
            return program.devices[0]
    return jax.local_devices(backend=placements.fallback[0].platform)[0]


def _place(
    body: m.Body,
    index: int,
    meshes: dict[int, jax.sharding.Mesh | None],
    placements: Placements,
    shape: tuple[int, ...],
    one: Any,
) -> Any:
    saved = body.shardings[index]
    if saved.mesh is None:
        return SingleDeviceSharding(one, memory_kind=saved.memory)
    if saved.mesh not in meshes:
        meshes[saved.mesh] = _find_mesh(body, body.meshes[saved.mesh], placements)
    mesh = meshes[saved.mesh]
    if mesh is None:
        return SingleDeviceSharding(one, memory_kind=saved.memory)
    spec = values.make_spec(saved)
    if dict(mesh.shape) != dict(body.meshes[saved.mesh].axes):
        spec = _fitting_spec(spec, mesh, shape)
    return NamedSharding(mesh, spec, memory_kind=saved.memory)


def _find_mesh(body: m.Body, saved: m.Mesh, placements: Placements) -> jax.sharding.Mesh | None:
    """Returns the mesh of this job that stands for a saved one."""
    for program in placements.programs:
        if program.mesh is not None:
            return program.mesh
        variant = program.variant
        for index in (*variant.in_shardings, *variant.out_shardings):
            mesh_index = None if index is None else body.shardings[index].mesh
            mesh = None if mesh_index is None else body.meshes[mesh_index]
            if mesh_index is None or mesh is None or mesh.positions is None:
                continue
            if mesh.axes == saved.axes:
                return values.Decoder(body, program.devices).mesh(mesh_index)
    if placements.mesh is not None:
        return placements.mesh
    devices = placements.devices or placements.fallback
    return make_mesh(saved, devices) if len(devices) >= saved.size else None


def make_mesh(saved: m.Mesh, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Returns a mesh of the saved axes over the first of `devices`, in their order."""
    mesh = msgspec.structs.replace(saved, positions=tuple(range(saved.size)))
    return values.Decoder(m.Body(meshes=(mesh,)), devices[: saved.size]).mesh(0)


def _fitting_spec(spec: Any, mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> Any:
    """Returns `spec` without the axes that `mesh` has not, or whose size does not divide the dimension."""
    entries = []
    for dimension, entry in zip(shape, tuple(spec), strict=False):
        names = () if entry is None else (entry if isinstance(entry, tuple) else (entry,))
        names = tuple(n for n in names if isinstance(n, str) and n in mesh.shape)
        size = int(np.prod([mesh.shape[n] for n in names], dtype=np.int64)) if names else 1
        entries.append(names if names and dimension % size == 0 else None)
    return jax.sharding.PartitionSpec(*entries)


def give_weak_types(state: Any, saved: Mapping[str, m.StateLeaf]) -> Any:
    """Returns `state` with weak types where it was saved with them; Orbax restores all types strong."""
    weak = {path for path, leaf in saved.items() if leaf.weak_type}
    if not weak:
        return state
    return jax.tree_util.tree_map_with_path(
        lambda path, x: values.with_weak_type(x) if trees.join(path) in weak else x, state
    )

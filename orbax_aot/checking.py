"""Would a checkpoint's executables load, here or elsewhere? Decided from the manifest; loads nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
from etils import epath

from orbax_aot import artifact as artifact_lib
from orbax_aot import locations, portable
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot import store as store_lib
from orbax_aot import topology as topology_lib
from orbax_aot.errors import CorruptArtifactError
from orbax_aot.report import FunctionReport, Reason, ReasonCode, RestoreReport, Verdict


@dataclasses.dataclass(frozen=True)
class Place:
    """A machine to ask about: `machine`, which of its devices, in which mesh; `note` says what was assumed."""

    machine: plan_lib.Machine
    mesh: tuple[tuple[str, int], ...] | None = None
    positions: tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None
    note: str = ""


def check(
    path: epath.PathLike,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    devices: Sequence[Any] | int | None = None,
    platform: str | None = None,
) -> RestoreReport:
    """Returns what a restore without live functions would decide. Loads and compiles nothing.

    Reads the manifest and, of what would be rebuilt, the StableHLO.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      mesh: the mesh of the restore; or the sizes of its axes by name, over the first devices.
      devices: the devices of the restore, in order; or all devices of a topology that is not here (see
        `precompile`); or how many there are of the kind that is here.
      platform: as `jax.devices` names it; by default that of the mesh or of the devices, else JAX's default. Of one
        that is not here, devices and runtime are taken to be those of the saved executables, and only their number and
        mesh, versions and settings are compared.

    Raises:
      NoExecutablesError: nothing was saved there, or several items were.
      CorruptArtifactError: the manifest is damaged.
      ValueError: a number of devices that is not positive, or a mesh of another size.
    """
    store = store_lib.Store(locations.find_item(path))
    manifest = store.read_manifest()
    place = describe_place(manifest, mesh, devices, platform)
    request = plan_lib.Request(mesh=place.mesh, positions=place.positions, devices=place.devices)
    reports = {}
    for name, plan in plan_lib.decide(manifest, place.machine, request).items():
        function = manifest.functions[name]
        decisions = tuple(
            _with_obstacle(
                decision, place, artifact_lib.SavedSignature(store, manifest.body, function, s)
            )
            for decision, s in zip(plan.decisions, function.signatures, strict=False)
        )
        reports[name] = _report(dataclasses.replace(plan, decisions=decisions), function)
    return RestoreReport(lambda: dict(reports), note=place.note)


def _with_obstacle(
    decision: plan_lib.Decision, place: Place, saved: artifact_lib.SavedSignature
) -> plan_lib.Decision:
    """Turns `REBUILT` into `REFUSED` where the StableHLO, which is read for this, cannot be built there."""
    if decision.verdict is not Verdict.REBUILT:
        return decision
    try:
        reason = _find_obstacle(place, saved)
    except CorruptArtifactError as e:
        reason = Reason(ReasonCode.CORRUPT, str(e))
    except portable.PortableError as e:
        reason = _reason_of(e.obstacle)
    if reason is None:
        return decision
    return dataclasses.replace(
        decision, verdict=Verdict.REFUSED, reasons=(*decision.reasons, reason)
    )


def _find_obstacle(place: Place, saved: artifact_lib.SavedSignature) -> Reason | None:
    """Returns why a signature cannot be rebuilt at a place; on the mesh that a restore would choose."""
    main = plan_lib.find_main_mesh(saved.signature, saved.body)
    axes = place.mesh
    if axes is None and main is not None:
        given = None if place.devices is None else len(place.devices)
        if given not in (None, 1, main.size):
            here = f"{given} devices; pass mesh= to say how to use them"
            return Reason(ReasonCode.DEVICE_COUNT, f"for {main.size} devices", here)
        if main.size <= (given or place.machine.topology.processes.count(place.machine.process)):
            axes = main.axes
    program = portable.PortableProgram.parse(saved.read_portable())
    if program.mesh_axes is None and program.nr_devices == 1:
        axes = None
    mesh_shape = None if axes is None else dict(axes)
    obstacle = program.find_obstacle(mesh_shape, place.machine.topology.platform)
    return None if obstacle is None else _reason_of(obstacle)


def _reason_of(obstacle: portable.Obstacle) -> Reason:
    return Reason(
        ReasonCode.__members__.get(obstacle.code, ReasonCode.NEEDS_SOURCE), obstacle.detail
    )


def _report(plan: plan_lib.FunctionPlan, function: m.Function) -> FunctionReport:
    reasons = [*plan.reasons, *(r for d in plan.decisions for r in d.reasons)]
    nbytes = sum(
        signature.variants[decision.variant].raw_nbytes
        for signature, decision in zip(function.signatures, plan.decisions, strict=False)
        if decision.variant is not None
    )
    return FunctionReport(
        verdict=plan.verdict,
        reasons=tuple(dict.fromkeys(reasons)),
        nbytes=nbytes,
        signatures=tuple(d.verdict for d in plan.decisions),
    )


def describe_place(
    manifest: m.Manifest,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None,
    devices: Sequence[Any] | int | None,
    platform: str | None,
) -> Place:
    """Returns the machine that is asked about; see `check`."""
    if isinstance(mesh, jax.sharding.Mesh):
        return _place_of_mesh(mesh)
    axes = None if mesh is None else tuple((str(n), int(size)) for n, size in mesh.items())
    size = None if axes is None else math.prod(size for _, size in axes)
    if devices is not None and not isinstance(devices, int):
        return _place_of_devices(tuple(devices), axes)
    if devices is not None and devices < 1:
        raise ValueError(f"devices={devices}: at least one.")
    if size is not None and devices is not None and size > devices:
        raise ValueError(f"A mesh of {size} devices does not fit on {devices}.")
    machine, note = _machine_for(manifest, platform)
    wanted = devices if devices is not None else max(size or 0, machine.topology.count)
    machine = with_count(machine, wanted)
    return Place(machine, axes, tuple(range(size or 0)), note=note)


def _place_of_devices(devices: tuple[Any, ...], axes: tuple[tuple[str, int], ...] | None) -> Place:
    """Returns the place of these devices; those that are not here are taken for a whole machine."""
    if axes is not None:
        return _place_of_mesh(topology_lib.make_mesh(dict(axes), devices))
    machine = _machine_of(devices)
    if topology_lib.is_here(devices[0]):
        by_id = {id_: i for i, id_ in enumerate(machine.topology.ids)}
        return Place(machine, devices=tuple(by_id[d.id] for d in devices))
    return Place(machine)


def _place_of_mesh(mesh: jax.sharding.Mesh) -> Place:
    flat = tuple(mesh.devices.flat)
    machine = _machine_of(flat)
    sizes = zip(mesh.axis_names, mesh.devices.shape, strict=True)
    axes = tuple((str(n), int(s)) for n, s in sizes)
    by_id = {id_: i for i, id_ in enumerate(machine.topology.ids)}
    return Place(machine, axes, tuple(by_id[d.id] for d in flat))


def _machine_of(devices: tuple[Any, ...]) -> plan_lib.Machine:
    if topology_lib.is_here(devices[0]):
        return topology_lib.describe_machine(devices[0].client)
    return topology_lib.describe_absent_machine(devices)


def _machine_for(manifest: m.Manifest, platform: str | None) -> tuple[plan_lib.Machine, str]:
    """Describes this machine; or, of a platform that is not here, what the manifest lets one assume."""
    here = topology_lib.describe_machine(_client(platform))
    if platform is None or here.topology.platform == platform:
        return here, ""
    variants = [
        v
        for function in manifest.functions.values()
        for signature in function.signatures
        for v in signature.variants
        if v.topology.platform == platform
    ]
    if not variants:
        unknown = m.Topology(
            platform=platform,
            platform_version="",
            device_kind=platform,
            count=here.topology.count,
            replicas=1,
            partitions=here.topology.count,
            coords=None,
            ids=tuple(range(here.topology.count)),
            processes=(0,) * here.topology.count,
        )
        note = f"There is no {platform} here, and nothing was compiled for one."
        return _with_topology(here, unknown), note
    widest = max(variants, key=lambda v: v.topology.count)
    topology = msgspec.structs.replace(
        widest.topology, replicas=1, partitions=widest.topology.count
    )
    note = (
        f"There is no {platform} here: devices and runtime are taken to be those of the save, "
        f"{topology.count} x {topology.device_kind}."
    )
    return _with_topology(here, topology), note


def _client(platform: str | None) -> Any:
    if platform is None:
        return None
    try:
        return jax.devices(platform)[0].client
    except RuntimeError:  # there is none here
        return None


def _with_topology(machine: plan_lib.Machine, topology: m.Topology) -> plan_lib.Machine:
    environment = machine.environment
    if topology.platform != "cpu":
        environment = msgspec.structs.replace(environment, cpu_features="")
    return msgspec.structs.replace(
        machine,
        topology=topology,
        kinds=(topology.device_kind,) * topology.count,
        environment=environment,
        process=topology.processes[0],
    )


def with_count(machine: plan_lib.Machine, count: int) -> plan_lib.Machine:
    """Returns the machine with another number of devices of its first kind, all in its process."""
    topology = machine.topology
    if count == topology.count:
        return machine
    ids = topology.ids[:count]
    more = range(max(topology.ids) + 1, max(topology.ids) + 1 + count - len(ids))
    keeps_coords = topology.coords is not None and not more
    return msgspec.structs.replace(
        machine,
        topology=msgspec.structs.replace(
            topology,
            count=count,
            partitions=count,
            ids=(*ids, *more),
            coords=topology.coords[:count] if keeps_coords and topology.coords else None,
            processes=(*topology.processes[:count], *(machine.process for _ in more)),
        ),
        kinds=(*machine.kinds[:count], *(machine.kinds[0] for _ in more)),
    )

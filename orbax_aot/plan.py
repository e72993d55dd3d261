"""The decision: what is saved × what is here × what is asked for → verdict and reasons, for each signature.

Pure: no I/O, no devices, no jax. Nothing else in the package compares saved with current.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orbax_aot import manifest as m
from orbax_aot.report import Reason, ReasonCode, Verdict


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a restore runs. Positions in a `Request` index the device list of `topology`."""

    topology: m.Topology
    kinds: tuple[str, ...]
    environment: m.Environment
    process: int


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is known here of one function. `code` is None where there is no live function."""

    live: bool = False
    code: m.Code | None = None
    options: dict[str, Any] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore asks for.

    `mesh` and `positions` describe a mesh over the machine's devices, row-major; `devices` a plain list; `single` is
    where a program for one device goes unless its arguments lie elsewhere. `functions`
    names what is wanted (None: all that is saved). `verify` is "code", "program" or "signature". `untrusted` says what
    stands against the saved native code, `portable_untrusted` what stands against the StableHLO; "" where nothing does.
    """

    mesh: tuple[tuple[str, int], ...] | None = None
    positions: tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None
    single: int | None = None
    functions: dict[str, Wanted] | None = None
    verify: str = "code"
    disabled: bool = False
    untrusted: str = ""
    portable_untrusted: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do with one signature.

    `variant` is the variant to load, and `assignment` the machine's devices for it, in the order of its device
    assignment; both None where nothing is loaded. With `PENDING`, `if_same` is the verdict once the program has
    turned out to be the saved one.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    variant: int | None = None
    assignment: tuple[int, ...] | None = None
    if_same: Verdict | None = None
    movable: bool = False  # runs on one device, wherever its arguments are


@dataclasses.dataclass(frozen=True)
class FunctionPlan:
    """The decisions for all signatures of a function; `decisions` is empty where none is saved."""

    decisions: tuple[Decision, ...] = ()
    reasons: tuple[Reason, ...] = ()
    live: bool = False
    live_everywhere: bool = True  # in all processes of the job that has it here

    @property
    def verdict(self) -> Verdict:
        verdicts = [d.verdict for d in self.decisions]
        if not verdicts:
            return Verdict.RECOMPILED if self.live else Verdict.REFUSED
        return max(verdicts, key=lambda v: v.rank)


def decide(
    manifest: m.Manifest | None,
    machine: Machine,
    request: Request,
    problem: Reason | None = None,
) -> dict[str, FunctionPlan]:
    """Decides for each function that is wanted, or for all that are saved.

    `manifest` is None where there is none to read; `problem` then says why, where that is not routine.
    """
    saved = {} if manifest is None else manifest.functions
    if manifest is not None and not manifest.is_readable:
        version = ".".join(map(str, manifest.version))
        problem = Reason(
            ReasonCode.FORMAT_VERSION,
            f"version {version}",
            f"version {m.FORMAT_VERSION[0]}.{m.FORMAT_VERSION[1]}",
        )
    wanted = request.functions
    if wanted is None:
        wanted = {name: Wanted() for name in saved}
    plans = {}
    for name, want in wanted.items():
        function = saved.get(name)
        if request.disabled:
            plans[name] = FunctionPlan(
                (), (Reason(ReasonCode.DISABLED, "", "ORBAX_AOT=off"),), want.live
            )
        elif problem is not None:
            plans[name] = FunctionPlan((), (problem,), want.live)
        elif function is None:
            detail = f"no function named {name!r}" + (f", only {sorted(saved)}" if saved else "")
            plans[name] = FunctionPlan((), (Reason(ReasonCode.NOT_SAVED, detail),), want.live)
        elif not function.signatures and function.absent is None:
            reason = Reason(ReasonCode.NOT_SAVED, "no signature of it")
            plans[name] = FunctionPlan((), (reason,), want.live)
        elif function.absent is not None:
            plans[name] = FunctionPlan((), (_reason_of(function.absent),), want.live)
        else:
            assert manifest is not None
            decisions = tuple(
                decide_signature(s, manifest.body, machine, request, want)
                for s in function.signatures
            )
            plans[name] = FunctionPlan(decisions, (), want.live)
    return plans


def _reason_of(absent: m.Absent) -> Reason:
    code = ReasonCode.__members__.get(absent.code, ReasonCode.NOT_SAVED)
    return Reason(code, absent.detail)


def decide_signature(
    signature: m.Signature, body: m.Body, machine: Machine, request: Request, want: Wanted
) -> Decision:
    """Decides for one signature: the best variant, or why none can be loaded here."""
    if signature.absent is not None:
        reasons = (_reason_of(signature.absent),)
        return _without_executable(signature, reasons, machine, request, want)
    if request.untrusted:
        reasons = (Reason(ReasonCode.UNTRUSTED, request.untrusted),)
        return _without_executable(signature, reasons, machine, request, want)
    fitting: list[Decision] = []
    unfit: list[tuple[Reason, ...]] = []
    for index, variant in enumerate(signature.variants):
        reasons, assignment = _judge_variant(variant, signature, body, machine, request, want)
        if reasons:
            unfit.append(reasons)
            continue
        ids = tuple(machine.topology.ids[i] for i in assignment)
        same = ids == variant.topology.ids
        fitting.append(
            Decision(
                Verdict.LOADED if same else Verdict.REMAPPED,
                variant=index,
                assignment=assignment,
                movable=variant.topology.count == 1 and request.devices is None,
            )
        )
    if not fitting:
        fallback = (Reason(ReasonCode.NOT_SAVED, "no executable of this signature"),)
        reasons = min(unfit, key=len) if unfit else fallback
        return _without_executable(signature, reasons, machine, request, want)
    asked = len(request.devices or request.positions)

    def merit(decision: Decision) -> tuple[bool, int, int]:
        """The variant for as many devices as are asked for, else the widest; then the one that needs no moving."""
        count = len(decision.assignment or ())
        return count == asked, count, -decision.verdict.rank

    best = max(fitting, key=merit)
    assert best.variant is not None
    return _judge_code(best, signature, signature.variants[best.variant], request, want)


def _without_executable(
    signature: m.Signature,
    reasons: tuple[Reason, ...],
    machine: Machine,
    request: Request,
    want: Wanted,
) -> Decision:
    if want.live:
        return Decision(Verdict.RECOMPILED, reasons)
    if request.portable_untrusted:
        return Decision(Verdict.REFUSED, reasons)
    if (obstacle := _find_no_portable(signature, machine)) is not None:
        return Decision(Verdict.REFUSED, (*reasons, obstacle))
    return Decision(Verdict.REBUILT, reasons)


def _find_no_portable(signature: m.Signature, machine: Machine) -> Reason | None:
    """Returns why there is no StableHLO to build from here; None where there is."""
    portable, platform = signature.portable, machine.topology.platform
    if portable is not None:
        # Devices say "gpu" where exports say which kind.
        accepted = ("cuda", "rocm") if platform == "gpu" else (platform,)
        if not set(accepted).isdisjoint(portable.platforms):
            return None
        return Reason(
            ReasonCode.PLATFORM, f"StableHLO for {', '.join(portable.platforms)}", platform
        )
    if signature.portable_absent is not None:
        return _reason_of(signature.portable_absent)
    return Reason(ReasonCode.NEEDS_SOURCE, "no StableHLO was stored (portable=False)")


def _judge_code(
    fit: Decision, signature: m.Signature, variant: m.Variant, request: Request, want: Wanted
) -> Decision:
    """Turns a decision to load into what the live function, where there is one, allows."""
    if not want.live:
        if _needs_live(variant):
            detail = "the program calls back into Python; pass the live function"
            return Decision(Verdict.REFUSED, (Reason(ReasonCode.NEEDS_SOURCE, detail),))
        return fit
    pending = lambda *reasons: dataclasses.replace(
        fit, verdict=Verdict.PENDING, reasons=reasons, if_same=fit.verdict
    )
    if request.verify == "signature":
        return pending() if _needs_live(variant) else fit
    if signature.program is None and signature.code is None:
        detail = "saved as a jax.stages.Compiled, which holds neither code nor program"
        return Decision(Verdict.RECOMPILED, (Reason(ReasonCode.NOT_COMPARABLE, detail),))
    if signature.program is None:
        detail = "saved without its program digest"
        return Decision(Verdict.RECOMPILED, (Reason(ReasonCode.NOT_COMPARABLE, detail),))
    if request.verify == "program" or _needs_live(variant):
        return pending()
    if (reason := find_code_difference(signature.code, want.code)) is not None:
        return pending(reason)
    return fit


def _needs_live(variant: m.Variant) -> bool:
    """Whether running a variant takes Python functions or tokens that only lowering the live function makes."""
    return variant.callbacks > 0 or variant.effects


def find_code_difference(saved: m.Code | None, here: m.Code | None) -> Reason | None:
    """Returns why two fingerprints of a function do not show that the code is the same; None where they do."""
    if saved is None or here is None:
        return Reason(ReasonCode.CODE_UNDECIDABLE, "no fingerprint of the code")
    unseen = list(saved.undecidable) + list(here.undecidable)
    if unseen:
        more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        return Reason(ReasonCode.CODE_UNDECIDABLE, unseen[0] + more)
    if saved.fingerprint != here.fingerprint:
        return Reason(
            ReasonCode.CODE_CHANGED, f"code {saved.fingerprint[:8]}", f"code {here.fingerprint[:8]}"
        )
    return None


def _judge_variant(
    variant: m.Variant,
    signature: m.Signature,
    body: m.Body,
    machine: Machine,
    request: Request,
    want: Wanted,
) -> tuple[tuple[Reason, ...], tuple[int, ...]]:
    """Returns all reasons against a variant, and its devices where there are none."""
    here = machine.topology
    saved = variant.topology
    reasons: list[Reason] = []

    def differ(code: ReasonCode, there: Any, now: Any) -> None:
        if there != now:
            reasons.append(Reason(code, str(there), str(now)))

    differ(ReasonCode.PLATFORM, saved.platform, here.platform)
    placed, assignment = _place(variant, signature, body, machine, request)
    if placed is not None:
        reasons.append(placed)
    if saved.platform == here.platform:
        kinds = "+".join(sorted({machine.kinds[i] for i in assignment})) or here.device_kind
        differ(ReasonCode.DEVICE_KIND, saved.device_kind, kinds)
        if not reasons and (moved := _find_layout_change(saved, here, assignment)):
            reasons.append(moved)
    differ(ReasonCode.PLATFORM_VERSION, saved.platform_version, here.platform_version)
    reasons += find_environment_changes(variant.environment, machine.environment)
    if want.live:
        differ(ReasonCode.COMPILE_OPTIONS, variant.environment.options, want.options)
    return tuple(reasons), assignment


def find_environment_changes(saved: m.Environment, here: m.Environment) -> list[Reason]:
    """Returns what differs in software and settings."""
    reasons = []
    versions = lambda e: f"jax {e.jax}, jaxlib {e.jaxlib}"
    if (saved.jax, saved.jaxlib) != (here.jax, here.jaxlib):
        reasons.append(Reason(ReasonCode.JAX_VERSION, versions(saved), versions(here)))
    if saved.cpu_features != here.cpu_features:
        gone, come = set_difference(saved.cpu_features, here.cpu_features)
        reasons.append(Reason(ReasonCode.CPU_FEATURES, gone, come))
    config, config_here = saved.config, here.config
    if saved.jax != here.jax:  # each JAX has settings of its own
        common = config.keys() & config_here.keys()
        config = {name: config[name] for name in common}
        config_here = {name: config_here[name] for name in common}
    for code, there, now in (
        (ReasonCode.XLA_FLAGS, saved.xla_flags, here.xla_flags),
        (ReasonCode.JAX_CONFIG, config, config_here),
    ):
        if there != now:
            reasons.append(Reason(code, *dict_difference(there, now)))
    return reasons


def set_difference(saved: str, here: str) -> tuple[str, str]:
    a, b = set(saved.split(",")), set(here.split(","))
    only = lambda s: ",".join(sorted(s)[:8]) + (f" and {len(s) - 8} more" if len(s) > 8 else "")
    return f"only there: {only(a - b) or '-'}", f"only here: {only(b - a) or '-'}"


def dict_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str]:
    names = sorted(n for n in {*saved, *here} if saved.get(n) != here.get(n))
    show = lambda d: ", ".join(f"{n}={d.get(n, 'unset')}" for n in names)
    return show(saved), show(here)


def _place(
    variant: m.Variant, signature: m.Signature, body: m.Body, machine: Machine, request: Request
) -> tuple[Reason | None, tuple[int, ...]]:
    """Finds the devices for a variant: by mesh, by device list, else the first that hold it."""
    saved, here = variant.topology, machine.topology
    count = saved.count
    if count != len(saved.ids) or count != saved.replicas * saved.partitions:
        detail = (
            f"{count} devices, though {len(saved.ids)} ids and {saved.replicas}x{saved.partitions} "
            "replicas x partitions"
        )
        return Reason(ReasonCode.DEVICE_COUNT, detail, f"{here.count} devices"), ()
    local = [i for i, process in enumerate(here.processes) if process == machine.process]
    if request.devices is not None:
        if count == 1:
            return None, request.devices[:1]
        if len(request.devices) != count:
            return _count_reason(count, len(request.devices)), ()
        return None, request.devices
    meshes = _meshes_of(variant, body)
    if request.mesh is not None and (
        count > 1 or any(mesh.axes == request.mesh for mesh in meshes)
    ):
        return _place_on_mesh(count, meshes, request)
    if count == 1 and len(request.positions) > 1 and find_main_mesh(signature, body) is not None:
        # A program over a mesh of which there also is a variant for one device.
        return _count_reason(count, len(request.positions)), ()
    if count == 1 and len(request.positions) == 1:
        return None, request.positions
    if count == 1 and request.single is not None:
        return None, (request.single,)
    if count <= len(local):
        return None, _in_saved_order(local[:count], saved, here)
    if count == here.count:
        return None, _in_saved_order(range(count), saved, here)
    return _count_reason(count, here.count), ()


def _in_saved_order(
    positions: Sequence[int], saved: m.Topology, here: m.Topology
) -> tuple[int, ...]:
    """Returns `positions` in the order of the save where they are the devices of the save.

    A mesh need not lie over the devices in their own order.
    """
    by_id = {here.ids[i]: i for i in positions}
    if sorted(by_id) != sorted(saved.ids):
        return tuple(positions)
    return tuple(by_id[i] for i in saved.ids)


def _count_reason(saved: int, here: int) -> Reason:
    devices = lambda n: f"{n} device" if n == 1 else f"{n} devices"
    return Reason(ReasonCode.DEVICE_COUNT, f"for {devices(saved)}", devices(here))


def _meshes_of(variant: m.Variant, body: m.Body) -> list[m.Mesh]:
    """Returns the meshes over all devices of a variant that its arguments and results are sharded by."""
    found: dict[int, m.Mesh] = {}
    for index in (*variant.in_shardings, *variant.out_shardings):
        mesh_index = None if index is None else body.shardings[index].mesh
        if mesh_index is not None:
            mesh = body.meshes[mesh_index]
            if mesh.positions is not None and mesh.size == variant.topology.count:
                found[mesh_index] = mesh
    return list(found.values())


def find_main_variant(signature: m.Signature, body: m.Body) -> m.Variant | None:
    """Returns the first variant of a signature that runs over a mesh of several devices; None without one."""
    for variant in signature.variants:
        if variant.topology.count > 1 and _meshes_of(variant, body):
            return variant
    return None


def find_main_mesh(signature: m.Signature, body: m.Body) -> m.Mesh | None:
    """Returns the mesh that a signature was compiled for; None where it was compiled for one device or for none."""
    variant = find_main_variant(signature, body)
    return None if variant is None else _meshes_of(variant, body)[0]


def _place_on_mesh(
    count: int, meshes: Sequence[m.Mesh], request: Request
) -> tuple[Reason | None, tuple[int, ...]]:
    """Puts a saved mesh on the requested one, position by position."""
    assert request.mesh is not None
    if len(request.positions) != count:
        return _count_reason(count, len(request.positions)), ()
    for mesh in meshes:
        if mesh.axes == request.mesh:
            assert mesh.positions is not None
            if sorted(mesh.positions) != list(range(count)):
                return Reason(ReasonCode.MESH_SHAPE, f"positions {mesh.positions}"), ()
            assignment = [0] * count
            for position, device in zip(mesh.positions, request.positions, strict=True):
                assignment[position] = device
            return None, tuple(assignment)
    if not meshes:  # no mesh to compare with: only the order of the devices matters
        return None, request.positions
    show = lambda axes: "x".join(f"{name}={size}" for name, size in axes)
    saved = " or ".join(show(mesh.axes) for mesh in meshes)
    return Reason(ReasonCode.MESH_SHAPE, saved, show(request.mesh)), ()


def _find_layout_change(
    saved: m.Topology, here: m.Topology, assignment: Sequence[int]
) -> Reason | None:
    """Returns a reason where devices with coordinates lie differently to one another, or to their hosts.

    A TPU executable may hold routes between chips. Devices without coordinates are interchangeable.
    """
    if saved.coords is None or here.coords is None:
        if saved.coords is None and here.coords is None:
            return None
        return Reason(ReasonCode.DEVICE_LAYOUT, f"coordinates {saved.coords}", f"{here.coords}")
    relative = lambda coords: [
        tuple(a - b for a, b in zip(c, coords[0], strict=True)) for c in coords
    ]
    now = [here.coords[i] for i in assignment]
    if len(saved.coords) != len(now) or relative(list(saved.coords)) != relative(now):
        return Reason(ReasonCode.DEVICE_LAYOUT, f"coordinates {saved.coords}", f"{tuple(now)}")
    if _grouping(saved.processes) != _grouping([here.processes[i] for i in assignment]):
        return Reason(ReasonCode.DEVICE_LAYOUT, f"processes {saved.processes}", "another layout")
    return None


def _grouping(processes: Sequence[int]) -> list[int]:
    """Returns processes numbered by first appearance, so that only who is together counts."""
    seen: dict[int, int] = {}
    return [seen.setdefault(p, len(seen)) for p in processes]

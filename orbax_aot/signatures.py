"""One saved signature of a function: loaded or rebuilt here, and held against the calls that might be meant."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version

from orbax_aot import artifact as artifact_lib
from orbax_aot import crash, trees
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot._jax import compiled as compiled_lib
from orbax_aot._jax import values
from orbax_aot.errors import (
    CorruptArtifactError,
    IncompatibleExecutableError,
    SignatureError,
    UntrustedArtifactError,
)
from orbax_aot.executable import LoadedProgram, PartiallySerialized
from orbax_aot.report import Reason, ReasonCode, Verdict

if TYPE_CHECKING:
    from orbax_aot.restored import RestoredFunction

_loaders = concurrent.futures.ThreadPoolExecutor(
    max_workers=max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="orbax_aot_load"
)


_SHOWN = 5  # differences that a message lists


@dataclasses.dataclass
class Match:
    """How a call fits a saved signature: `why` is empty where it does, `weakly` where only weak types differ."""

    why: str = ""
    weakly: bool = False


class RestoredSignature:
    """One saved signature of a function, being loaded or loaded, and what became of it so far."""

    def __init__(
        self,
        owner: RestoredFunction,
        index: int,
        saved: artifact_lib.SavedSignature,
        decision: plan_lib.Decision,
        devices: tuple[Any, ...],
        place: RebuildPlace,
        probe: Callable[[], str] | None = None,
    ):
        """`devices` are those of the decision's assignment, in order; `place` is where to rebuild otherwise.

        `probe` tells why the executable should not be loaded here, "" where it may.
        """
        self.owner = owner
        self.saved = saved
        self.signature = saved.signature
        self.body = saved.body
        self.decision = decision
        self.devices = devices
        self.place = place
        self._probe = probe
        self.verdict = decision.verdict
        self.reasons = decision.reasons
        self.checked_by = ""
        self.secs = 0.0
        self.nbytes = 0
        self.artifact: artifact_lib.Artifact | None = None
        self.executable: functions_lib.Executable | None = None
        self.where = f"{owner.name}/{index}"
        self._lock = threading.RLock()
        self._decoder = values.Decoder(saved.body, devices) if devices else None
        self._rebuilt: jax.stages.Compiled | None = None
        self._programs: dict[tuple[Any, ...], LoadedProgram] = {}
        self._others: artifact_lib.Others | None = None
        self._loading: concurrent.futures.Future[None] | None = None
        self._crash_key = ""

    @property
    def variant(self) -> m.Variant | None:
        index = self.decision.variant
        return None if index is None else self.signature.variants[index]

    @property
    def needs_lowering(self) -> bool:
        """Whether the program has callbacks or effects, which only the lowered live function can give."""
        variant = self.variant
        return variant is not None and (variant.callbacks > 0 or variant.effects)

    # -- loading -------------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether there is something to run, as far as is known yet."""
        return self.variant is not None or self._rebuilt is not None

    def start(self) -> None:
        """Starts to load or to rebuild in the background, where there is something to."""
        if self.variant is not None or self.verdict is Verdict.REBUILT:
            self._loading = _loaders.submit(self._load_or_rebuild)

    def _load_or_rebuild(self) -> None:
        if self.variant is not None:
            self._load()
        if self.variant is None and not self.owner.live:
            if self.saved.portable is not None:
                self._rebuild()
            if self.verdict is Verdict.REFUSED:
                self.owner.announce(Verdict.REFUSED, self.reasons, self.secs)

    def _load(self) -> None:
        try:
            start = time.perf_counter()
            with self.owner.timeline.span(self.where, "read"):
                self.artifact = self.saved.read_variant(self.decision.variant or 0)
                serialized = self.artifact.unpack(self.where)
            self.nbytes = len(serialized.payload)
            if not self.needs_lowering:
                if self._probe is not None and (why := self._probe()):
                    raise IncompatibleExecutableError(why)
                with self.owner.timeline.span(self.where, "load"):
                    self._programs[self.devices] = self._load_program(serialized, self.devices)
            self.secs = time.perf_counter() - start
            jax.monitoring.record_event_duration_secs(
                "/jax/orbax_aot/restore/load_secs", self.secs, function=self.owner.name
            )
            if self.verdict is not Verdict.PENDING:
                self.owner.announce(self.verdict, (), self.secs)
        except Exception as e:
            self.give_up(reason_of(e))

    def _load_program(
        self,
        serialized: PartiallySerialized,
        devices: tuple[Any, ...],
        lowered: jax.stages.Lowered | None = None,
    ) -> LoadedProgram:
        """Loads the payload, unless it has ended two processes already."""
        client = devices[0].client
        self._crash_key = crash.key_of(
            serialized.variant.raw_sha256, client.platform_version, jaxlib.version.__version__
        )
        if why := crash.find_crashes(self._crash_key):
            raise IncompatibleExecutableError(why)
        with crash.marked(self._crash_key):
            return LoadedProgram.load(serialized, devices, lowered)

    def _rebuild(self) -> None:
        """Compiles the saved StableHLO for where it is to run here. Traces nothing of the user's."""
        from orbax_aot import portable as portable_lib

        start = time.perf_counter()
        try:
            if self.place.reason is not None:
                return self.give_up(self.place.reason)
            program = portable_lib.PortableProgram.parse(self.saved.read_portable())
            if (why := self._find_other_program(program)) is not None:
                return self.give_up(Reason(ReasonCode.CORRUPT, why))
            if self.saved.is_confined and (calls := program.outside_calls):
                why = f"the StableHLO calls {', '.join(calls)}, and comes from no trusted source"
                return self.give_up(Reason(ReasonCode.UNTRUSTED, why))
            donated = [i for i, leaf in enumerate(self.signature.inputs) if leaf.donated]
            one_device = program.mesh_axes is None and program.nr_devices == 1
            mesh = None if one_device else self.place.mesh
            with self.owner.timeline.span(self.where, "rebuild"):
                compiled = program.compile(mesh, self.place.devices, donated=donated)
        except portable_lib.PortableError as e:
            code = ReasonCode.__members__.get(e.obstacle.code, ReasonCode.NEEDS_SOURCE)
            return self.give_up(Reason(code, e.obstacle.detail))
        except Exception as e:
            return self.give_up(reason_of(e))
        with self._lock:
            self._rebuilt = compiled
            self.devices = compiled_lib.devices_of(compiled)
            self.verdict = Verdict.REBUILT
            self.secs += time.perf_counter() - start
        jax.monitoring.record_event_duration_secs(
            "/jax/orbax_aot/restore/rebuild_secs",
            time.perf_counter() - start,
            function=self.owner.name,
        )
        self.owner.announce(Verdict.REBUILT, self.reasons, self.secs)

    def _find_other_program(self, program: Any) -> str | None:
        """Returns how the StableHLO is not that of this signature; None where it is."""
        for what, avals, leaves in (
            ("argument", program.in_avals, self.signature.inputs),
            ("result", program.out_avals, self.signature.outputs),
        ):
            found = [(tuple(a.shape), values.describe_dtype(a.dtype)) for a in avals]
            expected = [(leaf.shape, leaf.dtype) for leaf in leaves]
            if found != expected:
                return f"the StableHLO has other {what}s than the manifest"
        return None

    def wait(self) -> None:
        """Waits for the background load, if there is one."""
        loading = self._loading
        if loading is not None and (error := loading.exception()) is not None:
            with self._lock:
                if self._loading is loading:  # the first to see it
                    self._loading = None
                    self.give_up(Reason(ReasonCode.LOAD_FAILED, _one_line(error)))

    def give_up(self, *reasons: Reason) -> None:
        """Notes that the saved executable will not be used."""
        with self._lock:
            self.decision = dataclasses.replace(self.decision, variant=None, assignment=None)
            self.reasons = (*self.reasons, *reasons)
            self.verdict = Verdict.RECOMPILED if self.owner.live else Verdict.REFUSED
            self._programs.clear()
            self._rebuilt = None

    def follow(self, decision: plan_lib.Decision) -> None:
        """Takes over what all processes have agreed on."""
        with self._lock:
            if decision.verdict is Verdict.PENDING:
                self.verdict, self.reasons = decision.verdict, decision.reasons
                return
            self.give_up()
            self.verdict, self.reasons = decision.verdict, decision.reasons

    @property
    def spans_processes(self) -> bool:
        return len({d.process_index for d in self.devices}) > 1

    def program_on(
        self, devices: tuple[Any, ...], lowered: jax.stages.Lowered | None = None
    ) -> LoadedProgram | None:
        """Returns the loaded program on `devices`, loading it there if need be; None where that failed."""
        self.wait()
        with self._lock:
            if self.variant is None or self.artifact is None:
                return None
            if lowered is None and devices in self._programs:
                return self._programs[devices]
            try:
                serialized = self.artifact.unpack(self.where)
                program = self._load_program(serialized, devices, lowered)
            except Exception as e:
                self.give_up(Reason(ReasonCode.LOAD_FAILED, _one_line(e)))
                if self.verdict is Verdict.REFUSED:
                    self.owner.announce(Verdict.REFUSED, self.reasons, self.secs)
                return None
            self._programs[devices] = program
            return program

    # -- finding -------------------------------------------------------------------------------------------------

    def match(self, call: functions_lib.Call) -> Match:
        """Compares a call with this signature: paths, types, placements, static arguments, context."""
        signature = self.signature
        if not _same_static(signature.static, call.static):
            return Match(f"static arguments {signature.static}, now {call.static}")
        saved_paths = [leaf.path for leaf in signature.inputs]
        problems = []
        try:
            order = trees.find_order(saved_paths, call.paths)
            where: Sequence[int | None] = order or range(len(saved_paths))
        except SignatureError as e:  # the leaves that are on both sides are compared all the same
            problems.append(str(e))
            places = {path: i for i, path in enumerate(call.paths)}
            where = [places.get(path) for path in saved_paths]
        weakly = False
        expected = (
            self._expected_shardings() if self.is_usable and not self.decision.movable else []
        )
        differences = self._find_scattered(call)
        for leaf, i, sharding in itertools.zip_longest(signature.inputs, where, expected):
            if i is None:
                continue
            difference = None
            if leaf.kind != "token":
                aval = getattr(call.avals[i], "inner_aval", call.avals[i])
                difference = self._find_other_type(leaf, aval)
                weakly |= leaf.weak_type != bool(aval.weak_type)
            if difference is None and hasattr(sharding, "is_equivalent_to"):
                difference = self._find_other_place(leaf, call.placements[i], sharding)
            if difference is not None:
                differences.append(f"{leaf.path}: {difference}")
        if differences:
            problems.append(first_of(differences))
        return Match("; ".join(problems), weakly)

    def _find_other_type(self, leaf: m.Leaf, aval: Any) -> str | None:
        """Returns how an argument's type differs from the saved one; None where it does not."""
        found = (tuple(aval.shape), values.describe_dtype(aval.dtype))
        if found != (leaf.shape, leaf.dtype):
            saved, now = list(leaf.shape), list(found[0])
            return f"saved as {leaf.dtype}{saved}, now {found[1]}{now}"
        # A live function would be traced anew for another explicit sharding. What was saved takes any array that lies
        # where it should.
        if self.owner.live and (types := self._explicit_types(leaf, aval)) is not None:
            return f"saved as {types[0]}, now {types[1]}"
        return None

    def _explicit_types(self, leaf: m.Leaf, aval: Any) -> tuple[str, str] | None:
        """Returns the shardings in two types that differ in explicit mesh axes; None where they agree."""
        saved = now = ""
        if leaf.type is not None:
            sharding = self.body.shardings[leaf.type]
            mesh = None if sharding.mesh is None else self.body.meshes[sharding.mesh]
            if mesh is not None and "Explicit" in mesh.types:
                axes = "x".join(f"{n}={s}" for n, s in mesh.axes)
                saved = f"{values.make_spec(sharding)} over {axes}"
        sharding = getattr(aval, "sharding", None)
        if sharding is not None and any(t.name == "Explicit" for t in sharding.mesh.axis_types):
            axes = "x".join(
                f"{n}={s}"
                for n, s in zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True)
            )
            now = f"{sharding.spec} over {axes}"
        return None if saved == now else (saved or "no explicit sharding", now or "none")

    def _find_other_place(self, leaf: m.Leaf, placement: Any, expected: Any) -> str | None:
        """Returns where an argument lies instead of where it is expected; None where it lies well."""
        if placement is not None:
            if not _equivalent(placement, expected, len(leaf.shape)):
                return f"expected on {_show(expected)}, got on {_show(placement)}"
        elif self.owner.live and leaf.sharding is not None and not expected.is_fully_replicated:
            # jit would compile another program, in which XLA chooses where this argument lies.
            return f"expected on {_show(expected)}, got on no device"
        return None

    def _find_scattered(self, call: functions_lib.Call) -> list[str]:
        """Returns a difference where arguments for a program of one device lie on several."""
        if not (self.is_usable and self.decision.movable):
            return []
        asked = {d for p in call.placements if p is not None for d in p.device_set}
        return [] if len(asked) < 2 else [f"runs on one device, got arrays on {len(asked)}"]

    def _expected_shardings(self) -> list[Any]:
        """Returns where each input is expected, flat; None where it is unused or open."""
        if self._rebuilt is not None:
            return compiled_lib.argument_shardings(self._rebuilt)
        variant = self.variant
        assert variant is not None and self._decoder is not None
        expected: list[Any] = [None] * len(self.signature.inputs)
        for index, sharding in zip(variant.kept, variant.in_shardings, strict=True):
            if index >= len(variant.constants):
                expected[index - len(variant.constants)] = self._decoder.sharding(sharding)
        return expected

    def find_context_change(self, call: functions_lib.Call) -> Reason | None:
        """Returns how the thread's trace context differs from that at the time of compiling; None where equal."""
        there, now = self.signature.context, call.context
        if there is None or there == now:
            return None
        names = sorted(n for n in {*there, *now} if there.get(n) != now.get(n))
        show = lambda d: ", ".join(f"{n}={d.get(n, 'unset')}" for n in names)
        return Reason(ReasonCode.JAX_CONFIG, show(there), show(now))

    def make_entry(
        self,
        call: functions_lib.Call,
        *,
        exact: bool,
        lowered: jax.stages.Lowered | None = None,
    ) -> functions_lib.Entry | None:
        """Returns what runs the saved executable for a call; None where it cannot be loaded.

        The result's tree comes from `lowered` where that is given, else from the manifest; with `exact`, a tree that
        cannot be told from there raises `trees.UnknownNode`.
        """
        signature = self.signature
        saved_paths = [leaf.path for leaf in signature.inputs]
        if lowered is not None:
            order = trees.find_order(saved_paths, call.paths)
            result = trees.Result(lowered.out_tree, None)
        else:
            binding = trees.bind(
                call.in_tree,
                call.paths,
                saved_paths,
                signature.output_tree,
                len(signature.outputs),
                exact=exact,
            )
            order, result = binding.order, binding.result
        if self._rebuilt is not None:
            return functions_lib.Entry(self._rebuilt, result, order)
        devices = (call.device,) if self.decision.movable else self.devices
        program = self.program_on(devices, lowered if self.needs_lowering else None)
        if program is None:
            return None
        variant = program.saved.variant
        committed = variant.committed or call.is_committed
        self._note_use(program)
        first_run = crash.FirstRun(self._crash_key)
        return functions_lib.Entry(program.flat(committed=committed), result, order, first_run)

    def _note_use(self, program: LoadedProgram) -> None:
        variant = program.saved.variant
        same = tuple(d.id for d in program.devices) == variant.topology.ids
        self.verdict = Verdict.LOADED if same else Verdict.REMAPPED

    def as_executable(self) -> functions_lib.Executable | None:
        """Returns the executable for saving again: with its original bytes, and what was saved beside them.

        None where there is none.
        """
        self.wait()
        with self._lock:
            if self._rebuilt is not None and self.saved.is_confined:
                return None  # saved by us, it would be trusted from then on
            if self.executable is not None and self.is_usable:
                return self.executable
            if self._rebuilt is not None:
                compiled, artifact = self._rebuilt, None
            elif self._programs and self.artifact is not None:
                compiled, artifact = next(iter(self._programs.values())).flat(), self.artifact
            else:
                return None
            self.executable = functions_lib.Executable(
                compiled,
                name=self.owner.name,
                origin=functions_lib.Origin(self.verdict.value, self.secs, self.nbytes),
                artifact=artifact,
                complete=self._complete,
            )
            return self.executable

    def _complete(self, artifact: artifact_lib.Artifact) -> artifact_lib.Artifact:
        """Returns what is to be saved: the variant at hand, told as it was saved, with its companions."""
        if self._rebuilt is not None:  # a new variant of the signature as it was saved
            artifact = artifact.as_variant_of(self.signature, self.body)
        return self.read_others().join(artifact)

    def read_others(self) -> artifact_lib.Others:
        """Reads what was saved beside what is in use, once; to be called while the step it came from is there."""
        if self._others is None:
            self._others = self.saved.read_others(skip=self.decision.variant)
        return self._others


@dataclasses.dataclass(frozen=True)
class RebuildPlace:
    """Where a program without a fitting executable is rebuilt: on `mesh`, or on the first of `devices`.

    `reason` says why there is no such place.
    """

    mesh: jax.sharding.Mesh | None = None
    devices: tuple[Any, ...] = ()
    reason: Reason | None = None


def _show(sharding: Any) -> str:
    """Returns a sharding as people compare two: spec, axes, devices."""
    devices = ",".join(str(d.id) for d in sharding._device_assignment)
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = "x".join(f"{n}={s}" for n, s in sharding.mesh.shape.items())
        return f"{sharding.spec} over {axes} (devices {devices})"
    return f"{type(sharding).__name__} (devices {devices})"


def _equivalent(placement: Any, expected: Any, ndim: int) -> bool:
    try:
        return placement == expected or placement.is_equivalent_to(expected, ndim)
    except Exception:
        return False


def _same_static(saved: Sequence[Any], here: Sequence[Any]) -> bool:
    """Compares static arguments; what JSON could not hold is left to the fingerprint of the call."""
    return static_text(dict(saved)) == static_text(dict(here))


def reason_of(error: Exception) -> Reason:
    """Returns the reason that an error while reading or loading gives."""
    if isinstance(error, UntrustedArtifactError):
        return Reason(ReasonCode.UNTRUSTED, str(error))
    for kind, code in (
        (CorruptArtifactError, ReasonCode.CORRUPT),
        (TimeoutError, ReasonCode.TIMEOUT),
    ):
        if isinstance(error, kind):
            return Reason(code, _one_line(error))
    return Reason(ReasonCode.LOAD_FAILED, _one_line(error))


def listed(reasons: Sequence[Reason]) -> str:
    """Returns reasons as a part of a sentence; the details of some are sentences themselves."""
    return "; ".join(str(reason).rstrip(".") for reason in reasons)


def first_of(items: Sequence[str], separator: str = "; ") -> str:
    """Returns the first few of `items` and how many more there are."""
    more = f"{separator}and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def static_text(static: Mapping[str, Any]) -> str:
    """Returns static arguments as text, in which, as for jit, 1, 1.0 and True differ."""
    return json.dumps(static, sort_keys=True)

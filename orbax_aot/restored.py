"""Functions that came out of a checkpoint: loading them, and finding the one that a call asks for."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
from absl import logging

from orbax_aot import agreement, crash, multihost, trees
from orbax_aot import artifact as artifact_lib
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot._jax import compiled as compiled_lib
from orbax_aot._jax import dispatch, values
from orbax_aot.errors import (
    CorruptArtifactError,
    IncompatibleExecutableError,
    SignatureError,
    UntrustedArtifactError,
)
from orbax_aot.executable import LoadedProgram, PartiallySerialized
from orbax_aot.report import ALARMING, FunctionReport, Reason, ReasonCode, RestoreReport, Verdict
from orbax_aot.timeline import Timeline

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
            problems.append(_first_of(differences))
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
    return _static_text(dict(saved)) == _static_text(dict(here))


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


def _listed(reasons: Sequence[Reason]) -> str:
    """Returns reasons as a part of a sentence; the details of some are sentences themselves."""
    return "; ".join(str(reason).rstrip(".") for reason in reasons)


def _first_of(items: Sequence[str], separator: str = "; ") -> str:
    """Returns the first few of `items` and how many more there are."""
    more = f"{separator}and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


class RestoredFunction:
    """All saved signatures of one function, with the plan for them, bound to a live function or to none."""

    def __init__(
        self,
        name: str,
        plan: plan_lib.FunctionPlan,
        *,
        verify: str,
        on_mismatch: str,
        group: multihost.Group | None = None,
        timeline: Timeline | None = None,
    ):
        """`group` holds the processes that must come to the same decisions; `timeline` takes what is done when."""
        self.name = name
        self.plan = plan
        self.live = plan.live
        self.verify = verify
        self.on_mismatch = on_mismatch
        self.signatures: list[RestoredSignature] = []
        self._function_verdict = plan.verdict if not plan.decisions else None
        self._reasons: tuple[Reason, ...] = plan.reasons
        self._secs = 0.0
        self._said: set[tuple[Verdict, str]] = set()
        self._group = group
        self.timeline = Timeline() if timeline is None else timeline
        self._exchanges = itertools.count()
        self._lock = threading.RLock()

    def as_plan(self) -> plan_lib.FunctionPlan:
        """Returns what came of the plan, for the other processes; waits for loads."""
        self.wait()
        decisions = tuple(
            dataclasses.replace(s.decision, verdict=s.verdict, reasons=s.reasons)
            for s in self.signatures
        )
        return plan_lib.FunctionPlan(decisions, self._reasons, self.live)

    def follow(self, plan: plan_lib.FunctionPlan) -> None:
        """Takes over what all processes have agreed on after loading: what one lost, none uses."""
        self.live = plan.live
        self._reasons = plan.reasons
        if not plan.decisions:
            self._function_verdict = plan.verdict
            for signature in self.signatures:
                signature.give_up()
        for signature, decision in zip(self.signatures, plan.decisions, strict=False):
            if decision.verdict is not signature.verdict:
                signature.follow(decision)

    def _agree_on_call(
        self, signature: RestoredSignature, verdict: Verdict, why: str
    ) -> Reason | None:
        """Returns why this call must not go on as `verdict`, which other processes do not share; None where all do.

        Only programs that run in several processes need this. All make the call, and each asks here once, so that
        one whose code differs does not run another program than the others.
        """
        if self._group is None or self._group.is_alone or not signature.spans_processes:
            return None
        if not self.plan.live_everywhere:
            if verdict is Verdict.LOADED:
                return None
            raise self._refusal([Reason(ReasonCode.CODE_CHANGED, why)])
        own = plan_lib.FunctionPlan(
            (plan_lib.Decision(verdict, (Reason(ReasonCode.CODE_CHANGED, why),) if why else ()),),
            (),
            True,
        )
        try:
            views = self._group.exchange(
                f"call/{self.name}/{next(self._exchanges)}", agreement.make_view({self.name: own})
            )
        except Exception as e:
            return Reason(ReasonCode.OTHER_PROCESS, str(e))
        agreed = agreement.agree({self.name: own}, views, self._group.index)[self.name]
        if agreed.verdict is verdict:
            return None
        reasons = agreed.reasons or agreed.decisions[0].reasons
        return reasons[-1] if reasons else Reason(ReasonCode.OTHER_PROCESS)

    def start(self) -> None:
        for signature in self.signatures:
            signature.start()

    def wait(self) -> None:
        for signature in self.signatures:
            signature.wait()

    def executables(self) -> tuple[functions_lib.Executable, ...]:
        """Returns what has been loaded and not been refuted."""
        found = (s.as_executable() for s in self.signatures)
        return tuple(e for e in found if e is not None)

    def read_others(self) -> None:
        """Reads what later saves store beside what is in use. Takes file reads, so it belongs in a commit."""
        for signature in self.signatures:
            signature.wait()
            if signature.is_usable:
                signature.read_others()

    def report(self) -> FunctionReport:
        """Returns what became of the function; waits for loads under way."""
        self.wait()
        with self._lock:
            verdicts = tuple(s.verdict for s in self.signatures)
            considered = [*verdicts, *([self._function_verdict] if self._function_verdict else [])]
            verdict = max(considered, key=lambda v: v.rank) if considered else self.plan.verdict
            reasons = (*self._reasons, *(r for s in self.signatures for r in s.reasons))
            return FunctionReport(
                verdict,
                tuple(dict.fromkeys(reasons)),
                self._secs + sum(s.secs for s in self.signatures),
                sum(s.nbytes for s in self.signatures),
                verdicts,
                ", ".join(dict.fromkeys(s.checked_by for s in self.signatures if s.checked_by)),
            )

    # -- live ----------------------------------------------------------------------------------------------------

    def find_entry(
        self, call: functions_lib.Call, function: functions_lib.AotFunction
    ) -> functions_lib.Entry | None:
        """Answers a call of the live function: the saved executable where it is the same program, else compiled.

        Raises:
          IncompatibleExecutableError: a saved executable may not be used, and `on_mismatch="raise"`.
        """
        if self._function_verdict is Verdict.REFUSED:
            raise self._refusal(self._reasons)
        if not self.signatures:
            return self._compile(call, function, self._reasons)
        matches = [(signature, signature.match(call)) for signature in self.signatures]
        reason = Reason(ReasonCode.SIGNATURE_CHANGED, matches[0][1].why)
        for signature, match in sorted(matches, key=lambda pair: pair[1].weakly):
            if match.why:
                continue
            changed = signature.find_context_change(call)
            if changed is None or signature.variant is None:
                return self._use(signature, call, function, weakly=match.weakly)
            reason = changed
        with self._lock:
            self._reasons = tuple(dict.fromkeys((*self._reasons, reason)))
        return self._compile(call, function, (reason,), unseen=True)

    def _use(
        self,
        signature: RestoredSignature,
        call: functions_lib.Call,
        function: functions_lib.AotFunction,
        *,
        weakly: bool,
    ) -> functions_lib.Entry | None:
        signature.wait()
        if signature.variant is None:
            if signature.verdict is Verdict.REFUSED:
                raise self._refusal(signature.reasons)
            return self._compile(call, function, signature.reasons, signature)
        doubt = self._find_doubt(signature, call, function, weakly=weakly)
        verdict = Verdict.LOADED if doubt is None else Verdict.PENDING
        doubt = self._agree_on_call(signature, verdict, str(doubt or "")) or doubt
        if doubt is None:
            try:
                entry = signature.make_entry(call, exact=True)
            except trees.UnknownNode as e:
                doubt = Reason(ReasonCode.NOT_COMPARABLE, f"the result holds a {e}")
            else:
                if entry is None:
                    return self._compile(call, function, signature.reasons, signature)
                return self._adopt(
                    signature,
                    call,
                    function,
                    entry,
                    "code" if self.verify == "code" else self.verify,
                )
        return self._compare_programs(signature, call, function, doubt)

    def _refusal(self, reasons: Sequence[Reason]) -> IncompatibleExecutableError:
        return IncompatibleExecutableError(
            f"{self.name}: cannot be called here: {'; '.join(map(str, reasons))}. All processes refuse it "
            "alike, since those without the live function could not compile it."
        )

    def _find_doubt(
        self,
        signature: RestoredSignature,
        call: functions_lib.Call,
        function: functions_lib.AotFunction,
        *,
        weakly: bool,
    ) -> Reason | None:
        """Returns why the program must be traced and compared; None where the code is seen to be the same."""
        if weakly:
            return Reason(ReasonCode.SIGNATURE_CHANGED, "weak types differ")
        if self.verify == "signature":
            return (
                None
                if not signature.needs_lowering
                else Reason(ReasonCode.NOT_COMPARABLE, "callbacks")
            )
        if self.verify == "program" or signature.needs_lowering:
            return Reason(ReasonCode.NOT_COMPARABLE, "the program is compared")
        saved, here = signature.signature.code, function.call_code(call)
        if (reason := plan_lib.find_code_difference(saved, here)) is not None:
            return reason
        assert saved is not None
        if saved.call != here.call:
            return Reason(
                ReasonCode.CODE_CHANGED,
                f"arguments' static parts {saved.call[:8]}",
                f"{here.call[:8]}",
            )
        return None

    def _compare_programs(
        self,
        signature: RestoredSignature,
        call: functions_lib.Call,
        function: functions_lib.AotFunction,
        doubt: Reason,
    ) -> functions_lib.Entry | None:
        """Traces and lowers here; runs the saved executable where the program is the same."""
        from orbax_aot.program import program_digest

        with self.timeline.span(signature.where, "trace and lower"):
            lowering = function.lower_call(call)
        saved = signature.signature.program
        here = program_digest(lowering.lowered)
        # Callbacks of another program would read and write past the buffers of this one, so even a caller who asks
        # for no more than equal signatures gets them only with the same program.
        same = saved == here
        reasons = [doubt] if doubt.code is ReasonCode.CODE_CHANGED else []
        if saved is None:
            detail = "saved without its program digest"
            reasons.append(Reason(ReasonCode.NOT_COMPARABLE, detail))
        elif not same:
            reasons.append(
                Reason(
                    ReasonCode.PROGRAM_CHANGED,
                    f"program {str(saved)[7:15]}",
                    f"program {here[7:15]}",
                )
            )
        verdict = Verdict.LOADED if same else Verdict.RECOMPILED
        other = self._agree_on_call(signature, verdict, "" if same else str(reasons[-1]))
        if other is not None:
            reasons.append(other)
        if not same or other is not None:
            signature.reasons = ()
            signature.give_up(*reasons)
            return self._compile(call, function, signature.reasons, signature, lowering)
        entry = signature.make_entry(call, exact=False, lowered=lowering.lowered)
        if entry is None:
            return self._compile(call, function, signature.reasons, signature, lowering)
        signature.secs += lowering.secs
        signature.reasons = () if self.verify == "program" else (doubt,)
        return self._adopt(signature, call, function, entry, "program")

    def _adopt(
        self,
        signature: RestoredSignature,
        call: functions_lib.Call,
        function: functions_lib.AotFunction,
        entry: functions_lib.Entry,
        checked_by: str,
    ) -> functions_lib.Entry:
        signature.checked_by = checked_by
        executable = signature.as_executable()
        if executable is not None:
            function.adopt(call, executable)
        if checked_by == "program":
            self.announce(signature.verdict, signature.reasons, signature.secs)
        return entry

    def _compile(
        self,
        call: functions_lib.Call,
        function: functions_lib.AotFunction,
        reasons: tuple[Reason, ...],
        signature: RestoredSignature | None = None,
        lowering: functions_lib.Lowering | None = None,
        unseen: bool = False,
    ) -> functions_lib.Entry:
        if self.on_mismatch == "raise" and not unseen:
            raise IncompatibleExecutableError(
                f"{self.name}: the saved executable is not used: {_listed(reasons)}. "
                "Pass on_mismatch='recompile' to compile it anew."
            )
        lane = self.name if signature is None else signature.where
        if lowering is None:
            with self.timeline.span(lane, "trace and lower"):
                lowering = function.lower_call(call)
        start = time.perf_counter()
        with self.timeline.span(lane, "compile"):
            entry = function.compile_call(call, lowering)
        secs = time.perf_counter() - start + lowering.secs
        with self._lock:
            if signature is not None:
                signature.verdict = Verdict.RECOMPILED
                signature.secs += secs
            else:
                self._secs += secs
        self.announce(Verdict.RECOMPILED, reasons, secs)
        return entry

    def give_up(self, lacking: str) -> None:
        """Notes that jit compiles the function, since this JAX lacks what a restore needs."""
        reasons = (Reason(ReasonCode.JAX_VERSION, current=lacking),)
        with self._lock:
            self._function_verdict = Verdict.RECOMPILED
            self._reasons = reasons
            for signature in self.signatures:
                signature.verdict, signature.reasons = Verdict.RECOMPILED, ()
        self.announce(Verdict.RECOMPILED, reasons, 0.0)

    def announce(self, verdict: Verdict, reasons: Sequence[Reason], secs: float) -> None:
        """Records an event and writes the log line, at the level the reasons ask for.

        One line for a function: its other signatures, where they fare the same, are left to the verbose log.
        """
        jax.monitoring.record_event(
            f"/jax/orbax_aot/restore/{verdict.value}",
            function=self.name,
            reason=reasons[0].code.name if reasons else "",
        )
        why = f" ({'; '.join(map(str, reasons))})" if reasons else ""
        with self._lock:
            said_before = (verdict, why) in self._said
            self._said.add((verdict, why))
        level = logging.INFO
        if said_before:
            level = logging.DEBUG
        elif verdict is Verdict.REFUSED or any(r.code in ALARMING for r in reasons):
            level = logging.WARNING
        logging.log(level, "%s: %s in %.2f s%s", self.name, verdict.value, secs, why)


class SavedFunction(functions_lib.DirectCall):
    """A function of a checkpoint, called without its source.

    Takes arguments of any tree types with the key paths of a saved signature, and returns results in the types of
    the matching arguments.
    """

    def __init__(self, restored: RestoredFunction):
        self._restored = restored
        self._entries: dict[Any, functions_lib.Entry] = {}
        self._lock = threading.RLock()
        self.__name__ = self.__qualname__ = restored.name
        self.__call__ = dispatch.make_dispatcher(
            restored.name, self._explain_floating_point_error, self._miss
        )

    def __repr__(self) -> str:
        return f"SavedFunction({self._restored.name!r}, {self._restored.report().verdict})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The SavedFunction {self._restored.name!r} cannot be pickled; restore it from its checkpoint instead."
        )

    def __copy__(self) -> SavedFunction:
        return self  # functions are not copied either

    def __deepcopy__(self, memo: Any) -> SavedFunction:
        return self

    @property
    def executables(self) -> tuple[functions_lib.Executable, ...]:
        """What has been loaded."""
        return self._restored.executables()

    @property
    def signatures(self) -> tuple[m.Signature, ...]:
        """The saved signatures, as the manifest has them."""
        return tuple(s.signature for s in self._restored.signatures)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        restored = self._restored
        restored.wait()
        usable = [s for s in restored.signatures if s.is_usable]
        if not usable:
            reasons = _listed(restored.report().reasons) or "nothing was saved of it"
            raise IncompatibleExecutableError(
                f"{restored.name}: cannot be called here: {reasons.removesuffix('.')}. "
                "Pass the live function to AotRestore(fns={...}) to compile it."
            )
        has_static = any(s.signature.static for s in usable)
        static, usable, args, kwargs = _take_static(usable, args, kwargs)
        if not values.trace_state_is_clean() or any(
            map(values.is_tracer, jax.tree.leaves((args, kwargs)))
        ):
            raise TypeError(
                f"{restored.name}: a compiled function cannot be transformed or called inside another jit; "
                "pass the live function to AotRestore(fns={...})."
            )
        try:
            call = functions_lib.take_apart(args, kwargs)
        except TypeError as e:
            if not has_static:
                raise
            saved = _first_of([str(s.signature.static) for s in usable], "\n  ")
            raise SignatureError(
                f"{restored.name}: {e}. The static arguments are those of no saved signature:\n  {saved}"
            ) from e
        key = (static, call.key)
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries[key] = self._find_entry(call, usable)
        try:
            result, fast = entry.run(call.flat)
        except Exception as e:
            if dispatch.is_floating_point_error(e):
                self._explain_floating_point_error()
            raise
        # The C++ dispatcher does not know which arguments are static, and would take 2 for 3.
        return result, None if has_static else fast, False

    def _explain_floating_point_error(self, *args: Any, **kwargs: Any) -> Any:
        """Stands where `jax_debug_nans` runs a function's source to find the operation that made a NaN."""
        raise FloatingPointError(
            f"{self._restored.name}: invalid value (nan or inf) in a result. Pass the live function to "
            "AotRestore(fns={...}) to see which operation made it."
        )

    def _find_entry(
        self, call: functions_lib.Call, usable: Sequence[RestoredSignature]
    ) -> functions_lib.Entry:
        problems: list[str] = []
        matching: list[RestoredSignature] = []
        for signature in usable:
            as_static = tuple(map(tuple, signature.signature.static))
            match = signature.match(dataclasses.replace(call, static=as_static))
            if match.why:
                problems.append(match.why)
            else:
                matching.append(signature)
        if len(matching) > 1 and any(s.signature.static for s in matching):
            listed = _first_of([str(s.signature.static) for s in matching], "\n  ")
            raise SignatureError(
                f"{self._restored.name}: these saved signatures differ in static arguments alone, and the call does "
                f"not tell which of them is meant:\n  {listed}"
            )
        for signature in matching:
            entry = signature.make_entry(call, exact=False)
            if entry is not None:
                return entry
        if not problems:
            return self._miss_again()
        listed = _first_of(list(dict.fromkeys(problems)), "\n  ")
        raise SignatureError(
            f"{self._restored.name}: the arguments match none of {len(usable)} saved signatures:\n  {listed}"
        )

    def _miss_again(self) -> functions_lib.Entry:
        reasons = _listed(self._restored.report().reasons)
        raise IncompatibleExecutableError(f"{self._restored.name}: cannot be loaded: {reasons}")


def _take_static(
    signatures: Sequence[RestoredSignature], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Sequence[RestoredSignature], tuple[Any, ...], dict[str, Any]]:
    """Takes out of a call the arguments that were static when the function was compiled, where the caller gives them.

    Returns them as text, the signatures that were compiled for them, and the arguments that are left.
    """
    for signature in signatures:
        static = dict(signature.signature.static)
        names = {k for k in static if not k.isdigit()}
        positions = {int(k) for k in static if k.isdigit()}
        if not static or any(p >= len(args) for p in positions) or not names <= set(kwargs):
            continue
        given = {str(p): functions_lib.describe_static(args[p]) for p in positions}
        given |= {k: functions_lib.describe_static(kwargs[k]) for k in names}
        text = _static_text(given)
        if text == _static_text(static):
            alike = [s for s in signatures if _static_text(dict(s.signature.static)) == text]
            args = tuple(a for i, a in enumerate(args) if i not in positions)
            return text, alike, args, {k: v for k, v in kwargs.items() if k not in names}
    return "", signatures, args, kwargs


def _static_text(static: Mapping[str, Any]) -> str:
    """Returns static arguments as text, in which, as for jit, 1, 1.0 and True differ."""
    return json.dumps(static, sort_keys=True)


class RestoredFunctions(Mapping[str, Any]):
    """The functions of a restore by name: `fns["step"]` or `fns.step`."""

    def __init__(
        self,
        functions: Mapping[str, Any],
        restored: Mapping[str, RestoredFunction],
        note: str = "",
        timeline: Timeline | None = None,
    ):
        self._functions = dict(functions)
        self._restored = dict(restored)
        self.report = RestoreReport(
            lambda: {name: r.report() for name, r in self._restored.items()}, note, timeline
        )

    def __getitem__(self, name: str) -> Any:
        return self._functions[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while it is being copied, before it has any attributes
            raise AttributeError(name)
        if name not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none"
            raise AttributeError(f"no restored function {name!r}; there are: {known}")
        return self._functions[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __repr__(self) -> str:
        return f"RestoredFunctions({sorted(self._functions)})"

    def require_loaded(self) -> None:
        """Raises `IncompatibleExecutableError` unless every function was loaded or remapped."""
        bad = {
            name: report
            for name, report in self.report.items()
            if report.verdict not in (Verdict.LOADED, Verdict.REMAPPED)
        }
        if bad:
            lines = "\n  ".join(f"{name}: {report}" for name, report in sorted(bad.items()))
            raise IncompatibleExecutableError(f"not all functions were loaded:\n  {lines}")

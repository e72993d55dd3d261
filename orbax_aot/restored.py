"""Functions that came out of a checkpoint: finding what a call asks for, in this process and with the others."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from orbax_aot import agreement, multihost, trees
from orbax_aot import functions as functions_lib
from orbax_aot import manifest as m
from orbax_aot import plan as plan_lib
from orbax_aot._jax import dispatch, values
from orbax_aot.errors import (
    IncompatibleExecutableError,
    SignatureError,
)
from orbax_aot.report import ALARMING, FunctionReport, Reason, ReasonCode, RestoreReport, Verdict
from orbax_aot.signatures import RestoredSignature, first_of, listed, static_text
from orbax_aot.timeline import Timeline


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
                f"{self.name}: the saved executable is not used: {listed(reasons)}. "
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
            reasons = listed(restored.report().reasons) or "nothing was saved of it"
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
            saved = first_of([str(s.signature.static) for s in usable], "\n  ")
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
            listed = first_of([str(s.signature.static) for s in matching], "\n  ")
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
        listed = first_of(list(dict.fromkeys(problems)), "\n  ")
        raise SignatureError(
            f"{self._restored.name}: the arguments match none of {len(usable)} saved signatures:\n  {listed}"
        )

    def _miss_again(self) -> functions_lib.Entry:
        reasons = listed(self._restored.report().reasons)
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
        text = static_text(given)
        if text == static_text(static):
            alike = [s for s in signatures if static_text(dict(s.signature.static)) == text]
            args = tuple(a for i, a in enumerate(args) if i not in positions)
            return text, alike, args, {k: v for k, v in kwargs.items() if k not in names}
    return "", signatures, args, kwargs


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

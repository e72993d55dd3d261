"""What all processes of a job do, given what each would do alone.

Pure, as `plan` is: every process computes the same verdicts from the same views. A function loads in all of them or in
none, and where something must be compiled or refused, that too happens in all, since a process that went on alone
would wait for the others in the first collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec

from orbax_aot.plan import Decision, FunctionPlan
from orbax_aot.report import Reason, ReasonCode, Verdict

_LOADS = (Verdict.LOADED, Verdict.REMAPPED)


class SignatureView(msgspec.Struct, frozen=True):
    """What one process would do with a signature; `why` is for the others to read."""

    verdict: str
    variant: int | None = None
    why: str = ""


class FunctionView(msgspec.Struct, frozen=True):
    """What one process has of a function."""

    live: bool
    signatures: tuple[SignatureView, ...] = ()
    why: str = ""


class View(msgspec.Struct, frozen=True):
    """What one process would do, by function."""

    functions: dict[str, FunctionView] = {}


def make_view(plans: Mapping[str, FunctionPlan]) -> View:
    """Returns what the other processes need to know of this one's plans."""
    return View(
        {
            name: FunctionView(
                plan.live,
                tuple(
                    SignatureView(d.verdict.name, d.variant, _join(d.reasons))
                    for d in plan.decisions
                ),
                _join(plan.reasons),
            )
            for name, plan in plans.items()
        }
    )


def _join(reasons: Sequence[Reason]) -> str:
    return "; ".join(map(str, reasons))


def agree(
    plans: Mapping[str, FunctionPlan], views: Sequence[View], index: int
) -> dict[str, FunctionPlan]:
    """Returns the plans of this process that all processes take alike.

    `views` are those of all processes, by process index; `index` is this one. What another process cannot do is a
    reason here, too: `OTHER_PROCESS`, naming it.
    """
    return {name: _agree_on_function(name, plan, views, index) for name, plan in plans.items()}


def without_the_others(plans: Mapping[str, FunctionPlan], why: str) -> dict[str, FunctionPlan]:
    """Returns plans that load nothing, since what the others do is not known."""
    reason = Reason(ReasonCode.OTHER_PROCESS, why)
    return {
        name: FunctionPlan((), (*plan.reasons, reason), plan.live) for name, plan in plans.items()
    }


def _agree_on_function(
    name: str, plan: FunctionPlan, views: Sequence[View], index: int
) -> FunctionPlan:
    known = [view.functions.get(name) for view in views]
    asked = [view for view in known if view is not None]
    all_live = len(asked) == len(known) and all(view.live for view in asked)
    for other, view in enumerate(known):
        if view is None:
            return _give_up(plan, other, "does not restore this function", live=False)
        if len(view.signatures) != len(plan.decisions):
            return _give_up(plan, other, view.why or "sees another manifest", live=all_live)
    if not plan.decisions:
        if plan.live and not all_live:
            other = next(i for i, view in enumerate(asked) if not view.live)
            return _give_up(plan, other, "has no live function", live=False)
        return plan
    decisions = tuple(
        _agree_on_signature(own, [view.signatures[i] for view in asked], index, all_live)
        for i, own in enumerate(plan.decisions)
    )
    return dataclasses.replace(plan, decisions=decisions, live_everywhere=all_live)


def _give_up(plan: FunctionPlan, process: int, why: str, *, live: bool) -> FunctionPlan:
    reason = Reason(ReasonCode.OTHER_PROCESS, f"process {process}: {why}")
    return FunctionPlan((), (*plan.reasons, reason), live)


def _agree_on_signature(
    own: Decision, views: Sequence[SignatureView], index: int, all_live: bool
) -> Decision:
    verdicts = [Verdict[view.verdict] for view in views]
    variants = {view.variant for view in views}
    if all(v in _LOADS for v in verdicts) and len(variants) == 1:
        return own
    reasons = (*own.reasons, *_reasons_of_others(own, views, verdicts, index))
    if all(v is Verdict.REBUILT for v in verdicts):
        return own
    if not all_live:
        return Decision(Verdict.REFUSED, reasons)
    if all(v in (*_LOADS, Verdict.PENDING) for v in verdicts) and len(variants) == 1:
        return dataclasses.replace(
            own, verdict=Verdict.PENDING, reasons=reasons, if_same=own.if_same or own.verdict
        )
    return Decision(Verdict.RECOMPILED, reasons)


def _reasons_of_others(
    own: Decision, views: Sequence[SignatureView], verdicts: Sequence[Verdict], index: int
) -> tuple[Reason, ...]:
    """Returns the reason of the first other process that would do worse than this one."""
    for other, (view, verdict) in enumerate(zip(views, verdicts, strict=True)):
        differs = view.variant != own.variant and verdict in _LOADS and own.verdict in _LOADS
        if other != index and (verdict.rank > own.verdict.rank or differs):
            why = view.why or ("would load another variant" if differs else verdict.value)
            return (Reason(ReasonCode.OTHER_PROCESS, f"process {other}: {why}"),)
    return ()

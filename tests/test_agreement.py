"""One decision for all processes: a table, without processes."""

import itertools

import pytest

from orbax_aot import agreement
from orbax_aot.plan import Decision, FunctionPlan
from orbax_aot.report import Reason, ReasonCode, Verdict

LOADED = Decision(Verdict.LOADED, variant=0, assignment=(0, 1))
REMAPPED = Decision(Verdict.REMAPPED, variant=0, assignment=(1, 0))
OTHER_VARIANT = Decision(Verdict.LOADED, variant=1, assignment=(0, 1))
CHANGED = Reason(ReasonCode.CODE_CHANGED, "code a", "code b")
PENDING = Decision(
    Verdict.PENDING, (CHANGED,), variant=0, assignment=(0, 1), if_same=Verdict.LOADED
)
CORRUPT = Decision(Verdict.RECOMPILED, (Reason(ReasonCode.CORRUPT, "file"),))
REBUILT = Decision(Verdict.REBUILT, (Reason(ReasonCode.DEVICE_COUNT, "for 2 devices"),))
REFUSED = Decision(Verdict.REFUSED, (Reason(ReasonCode.DEVICE_COUNT, "for 2 devices"),))


def agreed(*plans: FunctionPlan) -> list[FunctionPlan]:
    """Returns what each process ends up with, all having one function."""
    views = [agreement.make_view({"f": plan}) for plan in plans]
    return [agreement.agree({"f": plan}, views, i)["f"] for i, plan in enumerate(plans)]


@pytest.mark.parametrize(
    ("own", "other", "live", "expected"),
    [
        (LOADED, LOADED, (True, True), "LOADED"),
        (LOADED, LOADED, (True, False), "LOADED"),
        (LOADED, PENDING, (True, True), "PENDING"),
        (LOADED, PENDING, (False, True), "REFUSED"),
        (LOADED, CORRUPT, (True, True), "RECOMPILED"),
        (LOADED, REFUSED, (False, False), "REFUSED"),
        (LOADED, REFUSED, (True, False), "REFUSED"),
        (LOADED, OTHER_VARIANT, (True, True), "RECOMPILED"),
        (LOADED, OTHER_VARIANT, (False, False), "REFUSED"),
        (REBUILT, REBUILT, (False, False), "REBUILT"),
        (REBUILT, LOADED, (False, False), "REFUSED"),
        (PENDING, CORRUPT, (True, True), "RECOMPILED"),
    ],
)
def test_all_processes_take_the_worst_verdict_that_all_can_take(own, other, live, expected):
    plans = agreed(FunctionPlan((own,), (), live[0]), FunctionPlan((other,), (), live[1]))
    assert [plan.decisions[0].verdict.name for plan in plans] == [expected, expected]


def test_processes_on_their_own_devices_keep_loaded_and_remapped_apart():
    plans = agreed(FunctionPlan((LOADED,)), FunctionPlan((REMAPPED,)))
    assert [plan.decisions[0].verdict for plan in plans] == [Verdict.LOADED, Verdict.REMAPPED]


def test_the_reason_names_the_process_and_tells_its_own():
    plans = agreed(FunctionPlan((LOADED,), (), True), FunctionPlan((CORRUPT,), (), True))
    assert [str(r) for r in plans[0].decisions[0].reasons] == [
        "OTHER_PROCESS: process 1: CORRUPT: file"
    ]
    assert plans[1].decisions[0].reasons == CORRUPT.reasons


def test_a_process_without_the_function_makes_all_refuse_it():
    plan = FunctionPlan((LOADED,), (), True)
    views = [agreement.make_view({"f": plan}), agreement.View()]
    found = agreement.agree({"f": plan}, views, 0)["f"]
    assert (found.verdict, found.live) == (Verdict.REFUSED, False)
    assert str(found.reasons[0]) == "OTHER_PROCESS: process 1: does not restore this function"


def test_a_process_that_cannot_read_the_manifest_makes_all_recompile():
    blind = FunctionPlan((), (Reason(ReasonCode.CORRUPT, "manifest.json"),), True)
    plans = agreed(FunctionPlan((LOADED,), (), True), blind)
    assert [plan.verdict for plan in plans] == [Verdict.RECOMPILED] * 2
    assert str(plans[0].reasons[0]) == "OTHER_PROCESS: process 1: CORRUPT: manifest.json"


def test_what_is_not_saved_and_not_live_everywhere_is_refused_everywhere():
    missing = (Reason(ReasonCode.NOT_SAVED, "f"),)
    plans = agreed(FunctionPlan((), missing, True), FunctionPlan((), missing, False))
    assert [plan.verdict for plan in plans] == [Verdict.REFUSED] * 2


def test_no_answer_makes_all_recompile():
    plan = agreement.without_the_others({"f": FunctionPlan((LOADED,), (), True)}, "process 1 …")
    assert plan["f"].verdict is Verdict.RECOMPILED


DECISIONS = (LOADED, REMAPPED, OTHER_VARIANT, PENDING, CORRUPT, REBUILT, REFUSED)


@pytest.mark.parametrize("live", [True, False])
def test_no_three_processes_ever_part_ways(live):
    loads = (Verdict.LOADED, Verdict.REMAPPED)
    for decisions in itertools.product(DECISIONS, repeat=3):
        plans = agreed(*(FunctionPlan((d,), (), live) for d in decisions))
        verdicts = {plan.decisions[0].verdict for plan in plans}
        assert len(verdicts) == 1 or verdicts <= set(loads), decisions
        if verdicts <= set(loads):
            assert len({plan.decisions[0].variant for plan in plans}) == 1

"""The corpus: the fingerprint against the truth, which is the digest of the lowered StableHLO."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import fp_corpus_edits
import fp_corpus_mutants
import fp_corpus_tricks
import fp_harness
import pytest
from fp_harness import Pair, Program, Verdict

# Set off a search with other mutants than those of a normal run.
_MUTATION_SEED = 0


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, list[Verdict]]:
    """All pairs, judged in two child processes (about a minute)."""
    groups: dict[str, list[Pair]] = {
        "edits": list(fp_corpus_edits.pairs()),
        "tricks": list(fp_corpus_tricks.pairs()),
        "mutants": list(fp_corpus_mutants.pairs(_MUTATION_SEED)),
        "running": [pair for both in fp_corpus_edits.running_pairs() for pair in both],
    }
    everything = [pair for group in groups.values() for pair in group]
    judged = iter(fp_harness.judge(everything, tmp_path_factory.mktemp("corpus")))
    return {name: [next(judged) for _ in group] for name, group in groups.items()}


def find_unsound(verdicts: Sequence[Verdict]) -> list[str]:
    """The pairs for which a restore would load an executable of another program."""
    return [v.pair.name for v in verdicts if v.judged_same and not v.same_program and not v.error]


def _valid(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if not v.error]


def test_no_two_different_programs_are_judged_the_same(verdicts):
    assert find_unsound([v for group in verdicts.values() for v in group]) == []


def test_the_corpus_is_large_and_at_least_half_of_it_are_mutants(verdicts):
    counts = {name: len(_valid(group)) for name, group in verdicts.items()}
    assert sum(counts.values()) >= 500
    assert counts["mutants"] >= sum(counts.values()) / 2
    real_changes = sum(not v.same_program for v in _valid(verdicts["mutants"]))
    assert real_changes >= 120, "too few mutants are other programs to prove anything"


def test_every_program_written_by_hand_runs(verdicts):
    broken = [v for v in verdicts["edits"] + verdicts["tricks"] + verdicts["running"] if v.error]
    assert not broken, broken[0].pair.name + broken[0].error


def test_the_edits_written_by_hand_are_what_they_say(verdicts):
    written = verdicts["edits"] + verdicts["tricks"]
    wrong = [v.pair.name for v in written if v.same_program != v.pair.harmless]
    assert wrong == []


def test_most_harmless_edits_are_judged_the_same_without_tracing(verdicts):
    harmless = [v for v in _valid(verdicts["edits"] + verdicts["mutants"]) if v.pair.harmless]
    missed = [(v.pair.name, v.undecidable[:2]) for v in harmless if not v.judged_same]
    assert len(harmless) >= 45
    assert len(missed) <= len(harmless) * 0.1, missed


def test_real_changes_are_decided_by_the_digest_and_not_by_giving_up(verdicts):
    """Were everything undecidable, the other tests would pass, and nothing would ever load."""
    changes = [v for v in _valid(verdicts["edits"] + verdicts["mutants"]) if not v.same_program]
    undecidable = collections.Counter(v.pair.name for v in changes if v.undecidable)
    assert len(undecidable) <= len(changes) * 0.05, undecidable


def test_a_function_traced_before_it_was_changed_is_never_taken_for_the_changed_one(verdicts):
    stale = [v for v in verdicts["running"] if not v.same_program]
    assert len(stale) >= 9, "the programs do not go stale; they test nothing"
    assert find_unsound(verdicts["running"]) == []


def test_the_check_for_unsoundness_can_fail():
    pair = Pair("x", Program({}), Program({}))
    assert find_unsound([Verdict(pair, same_program=False, same_digest=True)]) == ["x"]
    assert find_unsound([Verdict(pair, False, True, undecidable=("a reason",))]) == []

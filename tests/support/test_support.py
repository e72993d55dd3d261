"""Each row of `docs/support.md`: saved in one process, restored in others, on the same and on other devices."""

from __future__ import annotations

import jax
import pytest
import support_matrix
from support_cases import CASES
from support_run import outcome_of, run_all

pytestmark = pytest.mark.xdist_group("support")


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("support"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_restored_in_a_fresh_process_it_does_what_the_support_matrix_says(case, found):
    outcome, problems = outcome_of(case, found[case.id])
    assert problems == []
    assert outcome == case.expected_here()


def test_no_case_ends_a_process(found):
    deaths = [
        (id, how, line["died"])
        for id, lines in found.items()
        for how, line in lines.items()
        if line is not None and "died" in line
    ]
    assert deaths == []


def test_case_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


def test_docs_support_md_shows_what_was_found(found):
    """`make support` writes the results of this JAX and the page; both have to be current."""
    results = support_matrix.results_of(CASES, found)
    recorded = support_matrix.read_results()
    mine = recorded.get(support_matrix.minor_version(jax.__version__))
    assert mine is not None, "Run `make support` with this JAX."
    assert results["cases"] == mine["cases"]
    assert support_matrix.PAGE.read_text() == support_matrix.write_page(CASES, recorded)


def test_a_process_that_dies_is_noticed(monkeypatch, tmp_path):
    """The checker can fail: a case that ends its process is reported, and the others still run."""
    import support_run

    monkeypatch.setenv("ORBAX_AOT_SUPPORT_ABORT", CASES[1].id)
    lines = support_run.run_children("save", [case.id for case in CASES[:3]], tmp_path)
    assert lines[CASES[1].id]["died"] == -6
    assert "outputs" in lines[CASES[0].id] and "outputs" in lines[CASES[2].id]
    assert outcome_of(CASES[1], {"save": lines[CASES[1].id]}) == (
        "failed",
        ["saving: ended the process with -6"],
    )

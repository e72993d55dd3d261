"""A JAX newer than those this package knows, faked by taking away each private thing it uses in turn."""

from __future__ import annotations

import future_jax_cases as cases
import pytest
from processes import Child

# What a save, a restore and calls on plain CPU arrays must be seen to use, so that the fake is known to bite.
SURELY_USED = {
    "dispatch.make_dispatcher",
    "dispatch.call_flat",
    "config.trace_context",
    "compiled.load_executable",
    "devices.make_compile_options",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("future")
    with Child() as child:
        whole = child.run(cases.save_whole)
        return {
            entry: child.run(cases.without, entry, whole, folder / entry)
            for entry in cases.entries()
        }


def test_the_entries_are_really_taken_away(found):
    used = {entry for entry, one in found.items() if one["used"]}
    assert used >= SURELY_USED


@pytest.mark.parametrize("entry", cases.entries())
def test_without_one_entry_all_works_or_is_recompiled_with_a_reason(found, entry):
    one = found[entry]
    assert one["trouble"] == [], one.get("traceback")
    assert one["called"] == one["result"] == [0.0, 2.0, 4.0, 6.0]
    assert one["saved weights"] == one["weights"] == [0.0, 1.0, 2.0, 3.0]
    if one["verdict"] != "LOADED":
        assert one["verdict"] == "RECOMPILED"
        assert one["reasons"]


def test_where_dispatch_is_gone_the_report_names_the_version(found):
    (reason,) = found["dispatch.make_dispatcher"]["reasons"]
    assert reason.startswith("JAX_VERSION: jax ")
    assert reason.endswith("lacks what is needed: AttributeError: jax._src has no make_dispatcher")


def test_where_dispatch_is_gone_the_save_says_why_it_holds_no_executable(found):
    assert found["dispatch.make_dispatcher"]["absent"].startswith("NOT_SERIALIZABLE: ")
    unused = next(one for one in found.values() if not one["used"])
    assert unused["absent"] is None

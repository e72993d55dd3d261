"""The page that says what works with what is current, and each test that it names exists."""

from __future__ import annotations

import compatibility


def test_the_page_is_current():
    assert compatibility.PAGE.read_text() == compatibility.make_page(), (
        "run `python tests/compatibility.py`"
    )


def test_each_test_that_the_page_names_exists():
    assert compatibility.find_missing() == []


def test_a_test_that_is_gone_would_be_found(monkeypatch):
    gone = compatibility.Feature("x", "v1::test_that_is_gone", "gone::test_x")
    monkeypatch.setattr(compatibility, "FEATURES", (gone,))
    assert compatibility.find_missing() == ["gone::test_x", "v1::test_that_is_gone"]


def test_each_test_around_the_handler_is_on_the_page():
    page = compatibility.make_page()
    source = (compatibility.TESTS / "test_around_the_handler.py").read_text()
    names = [
        line.removeprefix("def ").partition("(")[0]
        for line in source.splitlines()
        if line.startswith("def test_")
    ]
    assert [n for n in names if n not in page] == [
        "test_without_source_another_dtype_is_refused_by_key_path"
    ]

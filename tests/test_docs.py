"""The documentation says what the code says."""

import pathlib
import re

from orbax_aot.report import ReasonCode, Verdict

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def _first_cells(text: str, heading: str) -> list[str]:
    section = text[text.index(heading) :]
    return re.findall(r"^\| `([A-Z_]+)` \|", section, flags=re.MULTILINE)


def test_troubleshooting_has_one_row_for_each_reason_in_the_enum_s_order():
    text = (DOCS / "troubleshooting.md").read_text()
    assert _first_cells(text, "## Reasons") == [code.name for code in ReasonCode]


def test_troubleshooting_explains_each_verdict():
    text = (DOCS / "troubleshooting.md").read_text()
    before_reasons = text[: text.index("## Reasons")]
    assert set(_first_cells(before_reasons, "| verdict")) == {v.name for v in Verdict}


def test_serving_names_only_tests_that_there_are():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "serving.md").read_text()))
    tests = DOCS.parent / "tests" / "serve"
    found = {
        n for f in tests.glob("test_*.py") for n in re.findall(r"def (test_\w+)", f.read_text())
    }
    assert named
    assert named <= found

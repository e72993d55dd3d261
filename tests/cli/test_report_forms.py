"""The report as people read it: a table, colours, HTML, one line, and a timeline of the restart."""

from __future__ import annotations

import html.parser
import io
import json
import re
import sys

import cli_checkpoint as saved
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import orbax_aot as oaot
from orbax_aot.report import FunctionReport, Reason, ReasonCode, RestoreReport, Verdict
from orbax_aot.timeline import Timeline


def make_report(**reports: FunctionReport) -> RestoreReport:
    return RestoreReport(lambda: dict(reports))


REPORT = make_report(
    step=FunctionReport(Verdict.LOADED, seconds=0.25, nbytes=31_200),
    other=FunctionReport(Verdict.LOADED),
    predict=FunctionReport(Verdict.RECOMPILED, (Reason(ReasonCode.DEVICE_COUNT, "for 8", "4"),)),
    bad=FunctionReport(Verdict.REFUSED, (Reason(ReasonCode.CORRUPT, "<b>&[red]"),)),
)


def test_one_line_for_a_log_names_functions_by_what_became_of_them():
    assert REPORT.summary() == (
        "REFUSED (CORRUPT): bad; LOADED: other, step; RECOMPILED (DEVICE_COUNT): predict"
    )
    assert make_report().summary() == "no functions"


def test_a_table_in_a_terminal_has_colours_and_as_text_has_none():
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard", width=100).print(REPORT)
    assert "\x1b[32mLOADED" in out.getvalue() and "\x1b[31mREFUSED" in out.getvalue()
    assert "\x1b" not in str(REPORT)
    assert re.search(r"bad +REFUSED +0\.00 +CORRUPT: <b>&\[red\]", str(REPORT))


class _Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_a_notebook_shows_a_table_in_which_nothing_is_taken_for_markup():
    parser = _Cells()
    parser.feed(REPORT._repr_html_())
    assert parser.open == []
    assert parser.rows[0] == ["function", "verdict", "seconds", "kB", "reason"]
    assert parser.rows[1] == ["bad", "REFUSED", "0.00", "", "CORRUPT: <b>&[red]"]
    assert parser.rows[4] == ["step", "LOADED", "0.25", "31", ""]
    assert make_report()._repr_html_() == "<p>no functions</p>"


# -- timeline --------------------------------------------------------------------------------------------------------


def trace_of(fns: oaot.RestoredFunctions, tmp_path) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns start and end by lane and by what was done."""
    fns.report.timeline(tmp_path / "restart.json")
    events = json.loads((tmp_path / "restart.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(lanes[event["tid"]], {})[event["name"]] = (
                event["ts"],
                event["ts"] + event["dur"],
            )
    return found


def restore(root, **args) -> oaot.Restored:
    with ocp.CheckpointManager(root, item_handlers=oaot.AotHandler()) as manager:
        return manager.restore(2, args=oaot.AotRestore(**args))


def test_a_timeline_tells_when_what_was_read_and_loaded_against_the_weights(saved_root, tmp_path):
    found = trace_of(restore(saved_root).fns, tmp_path)
    assert set(found) == {"manifest", "state", "train_step/0", "double/0"}
    assert set(found["train_step/0"]) == {"read", "load"}
    read, load = found["train_step/0"]["read"], found["train_step/0"]["load"]
    assert found["manifest"]["decide"][1] <= read[0] <= read[1] <= load[0] < load[1]
    assert found["state"]["weights"][0] >= found["manifest"]["decide"][1]


def test_a_timeline_tells_what_was_rebuilt_traced_and_compiled(saved_root, tmp_path):
    mesh = saved.make_mesh((4, 2))
    found = trace_of(restore(saved_root, mesh=mesh, fns=["train_step"]).fns, tmp_path)
    assert set(found["train_step/0"]) == {"rebuild"}

    changed = oaot.jit(lambda x: x * 5)
    fns = restore(saved_root, fns={"double": changed}).fns
    changed(np.ones(3, np.float32))
    assert fns.report["double"].verdict is Verdict.RECOMPILED
    found = trace_of(fns, tmp_path)["double/0"]
    assert set(found) == {"read", "load", "trace and lower", "compile"}
    assert found["trace and lower"][1] <= found["compile"][0]
    assert jax.tree.leaves(found)


def test_a_picture_needs_matplotlib_and_says_so(saved_root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = restore(saved_root).fns.report
    with pytest.raises(
        ModuleNotFoundError, match=r"needs matplotlib; install it, or write a \.json"
    ):
        report.timeline(tmp_path / "restart.png")
    assert not (tmp_path / "restart.png").exists()


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    timeline = Timeline()
    with timeline.span("step/0", "load"):
        pass
    timeline.write(tmp_path / "restart.png")
    assert (tmp_path / "restart.png").read_bytes().startswith(b"\x89PNG")


def test_what_has_no_timeline_and_what_is_no_picture_are_refused(saved_root, tmp_path):
    with pytest.raises(ValueError, match="Nothing was restored"):
        oaot.check(saved_root).timeline(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"written as \.json, \.png, \.svg or \.pdf"):
        restore(saved_root).fns.report.timeline(tmp_path / "x.txt")

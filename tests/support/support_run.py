"""Runs the cases of the support matrix in child processes, and says what came of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support_case import CARRIED, UNAVAILABLE, WITH_LIVE, Case, not_carried

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def run_children(how: str, ids: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Runs one way of restoring (or saving) for all ids; a case that ends the process is noted and left out."""
    results = folder / f"{how}.jsonl"
    found: dict[str, dict[str, Any]] = {}
    left = list(ids)
    while left:
        with open(folder / f"{how}.log", "ab") as log:
            child = subprocess.run(
                [sys.executable, HERE / "support_child.py", how, folder / "saved", results],
                input="\n".join(left),
                text=True,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))},
            )
        lines = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
        begun = None
        for line in lines:
            if line["state"] == "begun":
                begun = line["case"]
            else:
                found[line["case"]] = line
                begun = None
        if child.returncode and begun is None and not any(id in found for id in left):
            raise RuntimeError((folder / f"{how}.log").read_text()[-4000:])
        if begun is not None and begun not in found:
            found[begun] = {"case": begun, "died": child.returncode}
            results.write_text("")
        left = [id for id in left if id not in found]
    return found


def run_all(cases: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Saves all cases in one process and restores them in two others, without and with the live functions."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"save": run_children("save", [c.id for c in cases], folder)}
    ids = [id for id, line in found["save"].items() if "outputs" in line]
    with ThreadPoolExecutor() as pool:
        for how, lines in zip(
            ("saved", "live"),
            pool.map(lambda how: run_children(how, ids, folder), ("saved", "live")),
            strict=True,
        ):
            found[how] = lines
    return {case.id: {how: lines.get(case.id) for how, lines in found.items()} for case in cases}


def outcome_of(case: Case, found: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns the outcome of a case, and what about it is no support at all: each a sentence."""
    saved = found["save"]
    if "unavailable" in saved:
        return UNAVAILABLE, []
    if "outputs" not in saved:
        return "failed", [f"saving: {_trouble(saved)}"]
    problems: list[str] = []
    codes: dict[str, list[str]] = {}
    for how in ("saved", "live"):
        if found[how] is None or not {"same"} <= set(found[how]):
            problems.append(f"restoring {how}: {_trouble(found[how] or {})}")
            continue
        for place in ("same", "other"):
            if place in found[how]:
                here = found[how][place]
                codes.setdefault(how, []).extend(_codes(here))
                problems += [
                    f"restoring {how} on {place} devices: {p}"
                    for p in _problems(case, saved, here, how, place)
                ]
    if problems:
        return "failed", problems
    if codes["live"]:
        return not_carried(codes["live"][0]), problems
    return (WITH_LIVE if codes["saved"] else CARRIED), problems


def _trouble(line: dict[str, Any]) -> str:
    if "died" in line:
        return f"ended the process with {line['died']}"
    return line.get("traceback") or line.get("error") or str(line)[:300]


def _codes(here: dict[str, Any]) -> list[str]:
    """Returns the reason codes of the functions that were not loaded."""
    return [
        reason["code"]
        for report in here["report"].values()
        if report["verdict"] not in ("LOADED", "REMAPPED")
        for reason in report["reasons"] or [{"code": report["verdict"]}]
    ]


def _problems(case: Case, saved: Any, here: Any, how: str, place: str) -> list[str]:
    codes = _codes(here)
    problems = []
    if "outputs" not in here:
        if how == "live" or not codes:
            problems.append(here["traceback"])
        elif not here["error"].startswith("IncompatibleExecutableError"):
            problems.append(here["error"])
        return problems
    if here["outputs"] != saved["outputs"]:
        pairs = zip(saved["outputs"], here["outputs"], strict=False)
        different = [f"{a} is {b}" for a, b in pairs if a != b]
        problems.append(f"results differ: {different[:3] or (saved['outputs'], here['outputs'])}")
    if not codes:
        if here["counts"]["compiles"] and not case.may_compile:
            problems.append(f"compiled {here['counts']['compiles']} times")
        traced = {r["checked_by"] for r in here["report"].values()} == {"program"}
        if how == "live" and not case.by_program and (traced or here["counts"]["traces"]):
            why = {n: r["reasons"] for n, r in here["report"].items() if r["reasons"]}
            problems.append(f"traced {here['counts']['traces']} times: {why}")
        verdicts = {r["verdict"] for r in here["report"].values()}
        if verdicts != {"LOADED" if place == "same" else "REMAPPED"}:
            problems.append(f"verdicts {verdicts}")
    return problems

"""Writes `docs/support.md` from what the cases gave; run as a script by `make support`.

The results of each JAX are kept beside this file, so that a run under one of them renews its own column only.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support_case import CARRIED, UNAVAILABLE, WITH_LIVE, Case
from support_run import ROOT, outcome_of, run_all

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "support.md"

_HEAD = """\
# What a checkpoint can carry

Each row is a small program in `tests/support/`, saved in one process and restored in two others: without the live
function, and with it; on the same devices and, in the opposite order, on others. "Carried" means that the outputs
were the same bit for bit, that nothing was compiled, and that no process died. This page is written by
`make support` and checked by the tests; do not edit it.

- **carried**: runs with and without the live function.
- **carried, compared by program**: as above, but with the live function that function is traced and lowered at
  its first call, since a look at its code does not tell whether it is still the same. It is not compiled.
- **with live function**: the program calls Python, or needs the runtime's tokens. With the live function, that is
  traced and lowered at its first call and not compiled; without it, the function is refused (`NEEDS_SOURCE`).
- **not carried (code)**: the save records the reason; with the live function, it compiles as `jax.jit` would.
- **–**: this JAX has no such thing.
"""


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def results_of(cases: Sequence[Case], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is kept of a run: the outcome of each case, and whether the program had to be compared."""
    import jax

    return {
        "jax": jax.__version__,
        "cases": {case.id: _describe(case, found[case.id]) for case in cases},
    }


def _describe(case: Case, found: Mapping[str, Any]) -> str:
    outcome, _ = outcome_of(case, dict(found))
    if outcome == CARRIED:
        reports = found["live"]["same"]["report"].values()
        if any(report["checked_by"] == "program" for report in reports):
            return f"{CARRIED}, compared by program"
    return outcome


def read_results() -> dict[str, dict[str, Any]]:
    """Returns the results kept, by JAX's minor version, oldest first."""
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def write_page(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> str:
    versions = list(results)
    names = [results[version]["jax"] for version in versions]
    lines = [_HEAD, _summary(results), ""]
    section = ""
    for case in cases:
        if case.section != section:
            section = case.section
            lines += [f"\n## {section}\n", f"| | {' | '.join(f'jax {n}' for n in names)} |"]
            lines += ["|---|" + "---|" * len(names)]
        cells = [_cell(results[version]["cases"].get(case.id)) for version in versions]
        lines.append(f"| {case.title.replace('|', chr(92) + '|')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for result in results.values():
        counts = collections.Counter(_kind(o) for o in result["cases"].values())
        listed = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
        rows.append(f"- jax {result['jax']}: {listed}")
    return "\n".join(rows)


def _kind(outcome: str) -> str:
    return outcome.split(":")[0].split(",")[0]


def _cell(outcome: str | None) -> str:
    if outcome is None:
        return "not run"
    if outcome == UNAVAILABLE:
        return "–"
    if outcome.startswith("not carried: "):
        return f"not carried (`{outcome.partition(': ')[2]}`)"
    return f"**{outcome}**" if outcome == WITH_LIVE else outcome


def main() -> None:
    from support_cases import CASES

    with tempfile.TemporaryDirectory(prefix="orbax-aot-support-") as folder:
        found = run_all(CASES, Path(folder))
    bad = 0
    for case in CASES:
        outcome, problems = outcome_of(case, found[case.id])
        if problems or outcome != case.expected_here():
            bad += 1
            print(f"{case.id}: {outcome}, expected {case.expected_here()}", *problems, sep="\n  ")
    results = results_of(CASES, found)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{minor_version(results['jax'])}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(write_page(CASES, read_results()))
    print(f"{len(CASES)} cases under jax {results['jax']}, {bad} not as expected; {PAGE} written.")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

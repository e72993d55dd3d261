"""A short run of the fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import fuzz_mutations
import fuzz_run
import pytest

_CASES = 150
pytestmark = pytest.mark.xdist_group("fuzz")  # one process makes the cases


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("fuzz")
    fuzzer = fuzz_run.Fuzzer(root)
    fuzzer.make()
    for tier, seed in fuzz_run.tiers_of(_CASES, fuzzer.can_sign):
        fuzzer.run(tier, seed)
    yield fuzzer
    fuzzer.stop()
    fuzzer.print_counts()


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_damaged_artifacts_hurt_nobody(fuzzer: fuzz_run.Fuzzer, tier: int) -> None:
    tally = fuzzer.tallies[tier]
    if not tally.cases:
        pytest.skip("the extra `signing` is not installed")
    assert tally.problems(tier) == []
    assert len(tally.mutations) > 5


def test_the_fuzzer_counts_what_it_is_to_find(fuzzer: fuzz_run.Fuzzer) -> None:
    tally = fuzz_run.Tally(cases=1)
    bad = {
        "mutation": "x", "verdicts": {"f": "LOADED"}, "reasons": [], "raised": [],
        "weights": False, "wrong": ["f"], "silent": ["f"], "peak_mb": 1 << 20,
    }  # fmt: skip
    fuzzer._count(tally, bad, "case")
    fuzzer._count(tally, {"escaped": "E"}, "case")
    tally.crashes.append("case")
    tally.hangs.append("case")
    found = " ".join(tally.problems(3))
    for word in ("crashes", "hangs", "escaped", "lost", "wrong", "silent", "used", "peak memory"):
        assert word in found


def test_a_worker_that_dies_is_a_crash_and_the_next_case_runs(fuzzer: fuzz_run.Fuzzer) -> None:
    tally = fuzzer.tallies[1]
    fuzzer.run(1, 0)
    assert fuzzer._process is not None
    fuzzer._process.kill()
    assert fuzzer.run(1, 1) is None
    assert len(tally.crashes) == 1
    tally.crashes.clear()
    assert fuzzer.run(1, 2) is not None


def test_each_mutation_changes_something(tmp_path: Path, fuzzer: fuzz_run.Fuzzer) -> None:
    import shutil

    source = fuzzer._root / ("signed" if fuzzer.can_sign else "plain")
    other = source / "2" / "default" / "_aot"
    for mutation in sorted({m for ms in fuzz_mutations.TIERS.values() for m in ms}, key=str):
        if not fuzzer.can_sign and "signature" in mutation.__name__:
            continue
        changed = 0
        for seed in range(4):
            folder = tmp_path / "a" / "_aot"
            shutil.rmtree(folder.parent, ignore_errors=True)
            shutil.copytree(source / "1" / "default", folder.parent)
            before = _content(folder)
            mutation(fuzz_mutations.Artifact(folder, other), fuzz_mutations.random.Random(seed))
            changed += _content(folder) != before
        assert changed, mutation.__name__


def _content(folder: Path) -> dict[str, object]:
    return {
        str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else p.lstat().st_mode
        for p in sorted(folder.rglob("*"))
    }

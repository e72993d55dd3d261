"""The fuzzer: hands cases to a worker process, watches it, counts what came of them, and judges.

    python tests/fuzz/fuzz_run.py --cases 10000

Three tiers. 1: no digest is repaired, and nothing altered may ever be used. 2: the manifest's digest is repaired; the
process must live and the weights be there, though a function may do what the edited manifest says. 3: all digests are
repaired, and only a signature protects; the cases are restored with `Trust.signed`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("fuzz_worker.py")
_CASE_SECS = 60.0
_START_SECS = 180.0
_CASES_PER_WORKER = 1500
MAX_PEAK_MB = 2048
SHARES = {1: 0.4, 2: 0.4, 3: 0.2}


@dataclasses.dataclass
class Tally:
    """What came of the cases of one tier."""

    cases: int = 0
    crashes: list[str] = dataclasses.field(default_factory=list)
    hangs: list[str] = dataclasses.field(default_factory=list)
    escaped: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    silent: list[str] = dataclasses.field(default_factory=list)
    used: list[str] = dataclasses.field(default_factory=list)
    raised: int = 0
    peak_mb: int = 0
    verdicts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    mutations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def problems(self, tier: int) -> list[str]:
        """Returns what must not have happened."""
        found = []
        watched = ["crashes", "hangs", "escaped", "lost", "silent"]
        watched += {1: ["wrong"], 2: [], 3: ["wrong", "used"]}[tier]
        for name in watched:
            found += [f"tier {tier}: {name}: {case}" for case in getattr(self, name)]
        if self.peak_mb > MAX_PEAK_MB:
            found.append(f"tier {tier}: peak memory {self.peak_mb} MB, more than {MAX_PEAK_MB}")
        return found


class Fuzzer:
    """Runs cases in worker processes, one at a time."""

    def __init__(self, root: Path, log: Any = None):
        self._root = root
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._served = 0
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
        self._environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(_WORKER.parents[2]), os.environ.get("PYTHONPATH", "")))
        )
        self.tallies = {tier: Tally() for tier in (1, 2, 3)}

    def make(self) -> None:
        command = [sys.executable, str(_WORKER), "make", str(self._root)]
        subprocess.run(command, env=self._environment, check=True)
        self.can_sign = (self._root / "signed").exists()

    def run(self, tier: int, seed: int) -> dict[str, Any] | None:
        """Runs one case and counts it."""
        tally = self.tallies[tier]
        policy = "signed" if tier == 3 else "owner"
        if self._process is None or self._served >= _CASES_PER_WORKER:
            self.stop()
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._served += 1
        tally.cases += 1
        label = f"--tier {tier} --seed {seed}"
        try:
            self._process.stdin.write(
                json.dumps({"tier": tier, "seed": seed, "policy": policy}) + "\n"
            )
            self._process.stdin.flush()
            answer = self._answers.get(timeout=_CASE_SECS)
        except (queue.Empty, BrokenPipeError):
            answer = "" if self._process.poll() is not None else None
        if answer is None:
            tally.hangs.append(label)
            self.stop()
            return None
        if not answer:
            code = self._process.wait()
            tally.crashes.append(f"{label} (exit status {code})")
            self.stop()
            return None
        found = json.loads(answer)
        self._count(tally, found, label)
        return found

    def _count(self, tally: Tally, found: dict[str, Any], label: str) -> None:
        if "escaped" in found:
            tally.escaped.append(f"{label}: {found['escaped']}")
            return
        label = f"{label} ({found['mutation']})"
        tally.mutations[found["mutation"]] += 1
        tally.verdicts.update(found["verdicts"].values())
        tally.reasons.update(found["reasons"])
        tally.raised += len(found["raised"])
        tally.peak_mb = max(tally.peak_mb, found["peak_mb"])
        if not found["weights"]:
            tally.lost.append(label)
        if found["wrong"]:
            tally.wrong.append(f"{label}: {found['wrong']}")
        if found["silent"]:
            tally.silent.append(f"{label}: {found['silent']}")
        # The signature does not cover its own file: a space more in it changes nothing.
        by_design = found["mutation"] == "damage_signature"
        if not by_design and {*found["verdicts"].values()} & {"LOADED", "REMAPPED", "REBUILT"}:
            tally.used.append(f"{label}: {found['verdicts']}")

    def _start(self) -> None:
        command = [sys.executable, str(_WORKER), "run", str(self._root)]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log or subprocess.DEVNULL,
            text=True,
        )
        self._answers = queue.Queue()
        self._served = 0
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        reader.start()
        if not self._answers.get(timeout=_START_SECS):
            raise RuntimeError("the worker does not start")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        # Markers of crashed cases would refuse the untouched payloads of later ones.
        for path in (self._root / "cache").rglob("*"):
            if path.is_file():
                path.unlink()

    def print_counts(self) -> None:
        for tier, tally in self.tallies.items():
            count = lambda counter: ", ".join(f"{k} {v}" for k, v in counter.most_common())
            print(
                f"tier {tier}: {tally.cases} cases, {len(tally.crashes)} crashes, {len(tally.hangs)} hangs, "
                f"{len(tally.lost)} lost weights, {len(tally.escaped)} errors out of restore, "
                f"{len(tally.silent)} without a reason, {len(tally.wrong)} other results, "
                f"{tally.raised} calls that raised, peak {tally.peak_mb} MB"
            )
            print(f"  functions: {count(tally.verdicts)}")
            print(f"  reasons:   {count(tally.reasons)}")
            print(f"  mutations: {count(tally.mutations)}")


def _read(stream: Any, answers: queue.Queue[str]) -> None:
    for line in stream:
        answers.put(line)
    answers.put("")


def fast_folder() -> str | None:
    """Returns a folder in memory, where there is one: each case copies and removes a checkpoint."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def tiers_of(cases: int, can_sign: bool) -> list[tuple[int, int]]:
    """Returns (tier, seed) of each case; without the signing library, the third tier's go to the others."""
    shares = SHARES if can_sign else {1: 0.5, 2: 0.5}
    return [(tier, seed) for tier, share in shares.items() for seed in range(round(cases * share))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--tier", type=int)
    parser.add_argument(
        "--seed", type=int, help="with --tier: runs one case and prints what came of it"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="folder of checkpoints that were made before")
    parser.add_argument("--verbose", action="store_true", help="print what the workers print")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orbax_aot_fuzz_", dir=fast_folder()) as folder:
        root = options.root or Path(folder)
        fuzzer = Fuzzer(root, log=sys.stderr if options.verbose else None)
        try:
            fuzzer.make()
            if not fuzzer.can_sign:
                print("The third tier is left out: the extra `signing` is not installed.")
            if options.seed is not None:
                print(json.dumps(fuzzer.run(options.tier, options.seed), indent=1))
            else:
                cases = tiers_of(options.cases, fuzzer.can_sign)
                for tier, seed in cases:
                    if options.tier in (None, tier):
                        fuzzer.run(tier, seed + options.first_seed)
        finally:
            fuzzer.stop()
    fuzzer.print_counts()
    problems = [p for tier, tally in fuzzer.tallies.items() for p in tally.problems(tier)]
    print(f"{time.monotonic() - start:.0f} s; {len(problems)} problems")
    print("\n".join(problems[:50]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

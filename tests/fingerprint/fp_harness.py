"""Pairs of programs, and the two child processes that judge them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Program:
    """The files of a program (`main.py` holds `program()`), and how `fp_child` runs it."""

    files: dict[str, str]
    mode: str = "plain"

    def edited(self, old: str, new: str, file: str = "main.py") -> Program:
        text = self.files[file]
        assert text.count(old) >= 1, f"{old!r} is not in {file}"
        return dataclasses.replace(self, files={**self.files, file: text.replace(old, new, 1)})


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two programs. `harmless`: an edit that cannot matter, like a comment or a move."""

    name: str
    first: Program
    second: Program
    harmless: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out of one pair; `error` where one of the programs does not run at all."""

    pair: Pair
    same_program: bool = False
    same_digest: bool = False
    undecidable: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""

    @property
    def judged_same(self) -> bool:
        """Whether a restore would load the executable without tracing."""
        return self.same_digest and not self.undecidable


class Child:
    """One judging process, with its own hash seed and working folder."""

    def __init__(self, hash_seed: int, folder: pathlib.Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": str(hash_seed),
            "JAX_PLATFORMS": "cpu",
            "TMPDIR": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).parent / "fp_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=folder,
        )

    def send(self, jobs: Iterable[tuple[str, Program]]) -> None:
        assert self._process.stdin is not None
        for name, program in jobs:
            job = {"name": name, **dataclasses.asdict(program)}
            self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.close()

    def receive(self) -> dict[str, dict]:
        assert self._process.stdout is not None
        replies = [json.loads(line) for line in self._process.stdout]
        assert self._process.wait() == 0
        return {reply["name"]: reply for reply in replies}


def run_programs(
    programs: Sequence[tuple[str, Program]], folder: pathlib.Path, hash_seed: int
) -> dict[str, dict]:
    """Runs programs in one child process; for those that need no second one."""
    folder.mkdir(parents=True, exist_ok=True)
    child = Child(hash_seed, folder)
    _send_in_background([(child, programs)])
    return child.receive()


def judge(pairs: Sequence[Pair], folder: pathlib.Path) -> list[Verdict]:
    """Judges pairs: the first programs in one process, the second ones in another.

    The processes differ in hash seed and folder, as the process that saves and the one that
    restores may. Programs that several pairs share run once.
    """
    children = []
    for index, side in enumerate(("first", "second")):
        side_folder = folder / f"checkout-{side}"
        side_folder.mkdir(parents=True)
        jobs: dict[str, Program] = {}
        for pair in pairs:
            program = getattr(pair, side)
            jobs.setdefault(_key(program), program)
        children.append((Child(7 + index, side_folder), list(jobs.items())))
    _send_in_background(children)
    first, second = _receive([child for child, _ in children])
    return [_verdict(p, first[_key(p.first)], second[_key(p.second)]) for p in pairs]


def _key(program: Program) -> str:
    return json.dumps(dataclasses.asdict(program), sort_keys=True)


def _send_in_background(children) -> None:
    for child, jobs in children:
        threading.Thread(target=child.send, args=(jobs,), daemon=True).start()


def _receive(children: Sequence[Child]) -> list[dict[str, dict]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(Child.receive, children))


def _verdict(pair: Pair, first: dict, second: dict) -> Verdict:
    for reply in (first, second):
        if "error" in reply:
            return Verdict(pair, error=reply["error"])
    return Verdict(
        pair,
        same_program=first["program"] == second["program"],
        same_digest=first["digest"] == second["digest"],
        undecidable=(*first["undecidable"], *second["undecidable"]),
        seconds=max(first["seconds"], second["seconds"]),
    )

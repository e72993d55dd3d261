"""Saves on each supported JAX and restores on each other; prints what became of it as a table.

    python tests/upgrade_table.py PYTHON PYTHON ...

Each PYTHON is an interpreter that has the dependencies of this package, of any JAX version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


# -- in the interpreters ----------------------------------------------------------------------------------------------


def save(path: str) -> dict[str, Any]:
    import orbax_cases as cases

    return cases.save_layouts(path)


def restore(*paths: str) -> dict[str, Any]:
    """Restores each with the live function and without source, through each Orbax API, on other devices."""
    import orbax_cases as cases

    found: dict[str, Any] = {path: {} for path in paths}
    for path, reader, live in itertools.product(paths, ("v0", "v1"), (True, False)):
        how = f"{reader}, {'live function' if live else 'no source'}"
        found[path][how] = cases.load_layout(path, reader, "same", reader, live=live)
    return found


def version() -> dict[str, str]:
    import jax

    return {"jax": jax.__version__}


# -- around them ------------------------------------------------------------------------------------------------------


def run(python: str, function: str, *args: str) -> dict[str, Any]:
    """Runs a function of this module in another interpreter. Raises `RuntimeError` where that process fails or dies."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "ORBAX_AOT"))}
    env |= {
        "PYTHONPATH": os.pathsep.join((str(HERE.parent), str(HERE.parent.parent))),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [python, str(HERE), "--run", function, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(
            f"{python} {function}: exit status {done.returncode}\n{done.stderr[-3000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def make_table(pythons: list[str], folder: str) -> dict[str, Any]:
    """Returns `{"versions": …, "saved": {version: digests}, "restored": {saved on: {restored on: {how: what}}}}`."""
    versions = {run(python, "version")["jax"]: python for python in pythons}
    saved = {v: run(python, "save", f"{folder}/{v}") for v, python in versions.items()}
    paths = {v: f"{folder}/{v}" for v in versions}
    restored: dict[str, dict[str, Any]] = {v: {} for v in versions}
    for new, python in versions.items():
        found = run(python, "restore", *paths.values())
        for old, path in paths.items():
            restored[old][new] = found[path]
    return {"versions": list(versions), "saved": saved, "restored": restored}


def print_table(table: dict[str, Any]) -> None:
    for old, row in table["restored"].items():
        for new, found in row.items():
            for how, what in found.items():
                report = what["report"]["step"]
                reasons = "; ".join(report["reasons"])
                print(f"{old:10} -> {new:10} {how:18} {report['verdict']:11} {reasons}")


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    pythons = parser.parse_args().pythons
    with tempfile.TemporaryDirectory() as folder:
        print_table(make_table(pythons, folder))


if __name__ == "__main__":
    main()

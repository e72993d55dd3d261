"""Nothing that is read from a checkpoint is unpickled, compiled or executed as Python."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_CHILD = Path(__file__).with_name("audit_child.py")
_PACKAGE = Path(__file__).parents[2] / "orbax_aot"


def _run(item: Path, *mode: str) -> list[str]:
    command = [sys.executable, str(_CHILD), str(item), *mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_restore_unpickles_nothing_and_executes_no_code(item: Path) -> None:
    assert _run(item) == []


@pytest.mark.parametrize(
    ("mode", "event"),
    [("unpickle", "pickle.find_class"), ("exec", "exec"), ("compile", "compile")],
)
def test_the_hook_sees_what_it_is_to_see(item: Path, mode: str, event: str) -> None:
    assert any(found.startswith(event) for found in _run(item, mode))


def test_the_package_names_no_pickle_and_no_exec() -> None:
    forbidden = re.compile(r"^\s*(import|from) (pickle|cloudpickle|dill|shelve)\b|\b(exec|eval)\(")
    for path in sorted(_PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not forbidden.search(line.partition("#")[0]), f"{path}:{number}: {line}"

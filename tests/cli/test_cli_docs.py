"""The session in docs/cli.md is what the commands print; UPDATE_SNAPSHOTS=1 writes it anew."""

from __future__ import annotations

import os
import pathlib
import re
import shlex

import cli_support as support
import pytest

from orbax_aot import cli

DOC = pathlib.Path(__file__).parents[2] / "docs/cli.md"
_BLOCK = re.compile(r"```(python|console)\n(.*?)```", flags=re.DOTALL)


def normalised(text: str) -> list[str]:
    """Leaves out what differs with the machine, the version of JAX and the widths that follow from them."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", text)
    text = re.sub(r"(?m)( on) \S+$", r"\1 HOST", text)
    text = re.sub(r"\d[\d.]*(e[+-]\d+)?( [kM]?B\b)?", "N", text)
    lines = (re.sub(r"[\s─]+", " ", line).strip() for line in text.splitlines())
    # Wrapped lines follow from widths; XLA's estimates are its own affair.
    return [
        line
        for line in lines
        if line and not re.match(r"[│├└ ]*(cost|memory per|jaxlib|alias|k?B$|N$)", line)
    ]


def run_session(text: str) -> str:
    """Returns a block of commands with what they print now."""
    shown = []
    for line in text.splitlines():
        if not line.startswith("$ "):
            continue
        _, *arguments = shlex.split(line[2:])
        result = support.run(*arguments)
        output = "".join(f"{x.rstrip()}\n" for x in result.output.splitlines())
        code = f"exit code {result.exit_code}\n" if result.exit_code else ""
        shown.append(f"{line}\n{output}{code}")
    return "\n".join(shown)


def test_the_session_is_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = DOC.read_text()
    pieces, at = [], 0
    for block in _BLOCK.finditer(document):
        kind, text = block.groups()
        if kind == "python":
            exec(compile(text, str(DOC), "exec"), {"__name__": "session"})
            now = text
        else:
            now = run_session(text)
            if not os.environ.get("UPDATE_SNAPSHOTS"):
                assert normalised(now) == normalised(text)
        pieces += [document[at : block.start(2)], now]
        at = block.end(2)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        DOC.write_text("".join((*pieces, document[at:])))


@pytest.mark.parametrize("name", sorted(cli.main.commands))
def test_each_command_is_documented_and_explains_itself(name):
    assert f"| `{name} " in DOC.read_text()
    result = support.run(name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80

"""The second reader refuses what the first one does, and shares nothing with it."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
from pathlib import Path

import independent_reader
import pytest

_HERE = Path(__file__).parent
_ATTACKS = sorted((_HERE / "attacks" / "corpus").glob("*.py"))
_GOLDEN = sorted((_HERE / "golden").glob("format-*"))[-1]
# About owners and about what a loader must check: nothing that a reader of files could see.
_NOT_OF_THE_FORMAT = {
    "world_writable_manifest", "world_writable_payload", "world_writable_folder", "too_many_devices",
    "no_devices", "index_out_of_range", "negative_index", "kept_twice",
    "newer_major",
}  # fmt: skip


def test_it_needs_the_standard_library_and_zstandard_only() -> None:
    tree = ast.parse((_HERE / "independent_reader.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert {n.split(".")[0] for n in names} - {*sys.stdlib_module_names} == {"zstandard"}


@pytest.mark.parametrize("path", _ATTACKS, ids=lambda p: p.stem)
def test_it_refuses_each_attack_on_the_format(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(path.parents[1]))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    attack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attack)
    import attack_tools

    monkeypatch.setattr(attack_tools, "PAYLOAD", "look_up/0/0.pjrt.zst")
    monkeypatch.setattr(attack_tools, "PORTABLE", "look_up/0/portable.stablehlo.zst")
    monkeypatch.setattr(
        attack_tools, "signature", lambda body: body["functions"]["look_up"]["signatures"][0]
    )
    item = tmp_path / "item"
    shutil.copytree(_GOLDEN / "item", item)
    _rename_function(item / "_aot", attack_tools)
    attack.attack(item / "_aot")

    def read() -> None:
        body = independent_reader.read_manifest(str(item))
        independent_reader.read_files(str(item), body)

    if path.stem in _NOT_OF_THE_FORMAT:
        read()
        return
    with pytest.raises(independent_reader.Refused):
        read()


def _rename_function(aot: Path, tools: object) -> None:
    """Gives a function the name and folder that the attacks expect, where they name it."""
    body = tools.read_body(aot)  # type: ignore[attr-defined]
    body["functions"]["step"] = {**body["functions"]["look_up"], "folder": "step"}
    shutil.copytree(aot / "look_up", aot / "step")
    tools.write_body(aot, body)  # type: ignore[attr-defined]

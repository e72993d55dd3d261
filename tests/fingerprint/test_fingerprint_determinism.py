"""The same code has the same digest in every process, folder and hash seed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import fp_corpus_edits
import pytest

ROOT = pathlib.Path(__file__).parents[2]
_PROGRAMS = {
    "helpers": fp_corpus_edits._STEP,
    "linen": fp_corpus_edits._LINEN,
    "nnx": fp_corpus_edits._NNX,
}
_PRINT = """

def print_fingerprint():
    from orbax_aot.fingerprint import fingerprint_call, fingerprint_function
    p = program()
    found = fingerprint_call(p["fun"], p["args"], {}, p.get("options"))
    alone = fingerprint_function(p["fun"], p.get("options"))
    print(found.digest, alone.digest, *found.undecidable, *alone.undecidable)


if __name__ == "__main__":
    print_fingerprint()
"""


def run(folder: pathlib.Path, *command: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
    ).stdout.strip()  # fmt: skip


def write(folder: pathlib.Path, files: dict[str, str], script: str = "main.py") -> None:
    for name, text in files.items():
        path = folder / (script if name == "main.py" else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + _PRINT if name == "main.py" else text)


@pytest.mark.parametrize("name", _PROGRAMS)
def test_digests_do_not_depend_on_process_seed_folder_or_how_the_program_is_run(tmp_path, name):
    files = _PROGRAMS[name].files
    here, there = tmp_path / "here", tmp_path / "there/and/far"
    write(here, files)
    write(there, files, "renamed.py")
    commented = {
        name: "# a comment\n\n\n" + text.replace("\n\n\n", "\n\n# more\n\n\n")
        for name, text in files.items()
    }
    write(tmp_path / "commented", commented)
    outputs = {
        "script": run(here, "main.py", PYTHONHASHSEED="1"),
        "imported": run(here, "-c", "import main; main.print_fingerprint()", PYTHONHASHSEED="2"),
        "renamed, another folder": run(there, "renamed.py", PYTHONHASHSEED="3"),
        "commented, module": run(tmp_path / "commented", "-m", "main", PYTHONHASHSEED="4"),
        "more libraries loaded": run(
            here, "-c", "import sklearn.svm, orbax.checkpoint, main; main.print_fingerprint()"
        ),
    }
    assert len(outputs["script"].split()) == 2, "undecidable: " + outputs["script"]
    assert set(outputs.values()) == {outputs["script"]}, outputs


def test_digests_depend_on_optimized_mode(tmp_path):
    """Assert statements do not run there, and may hold what a program computes."""
    write(tmp_path, fp_corpus_edits._STEP.files)
    assert run(tmp_path, "main.py") != run(tmp_path, "-O", "main.py")

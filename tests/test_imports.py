"""What must not need jax does not import it, and importing the package imports next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{}
found = [m for m in sys.modules if m.partition(".")[0] in ("jax", "jaxlib", "orbax", "flax", "tensorstore")]
sys.exit(f"imported {{found}}" if found else 0)
"""


def run(lines):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(lines)], capture_output=True, text=True
    )


@pytest.mark.parametrize("module", ["manifest", "store", "plan", "report", "errors", "version"])
def test_this_module_imports_no_jax(module):
    done = run(f"import orbax_aot.{module}")
    assert (done.returncode, done.stderr) == (0, "")


def test_reading_a_manifest_imports_no_jax():
    done = run(
        "import orbax_aot as oaot\n"
        "from orbax_aot import manifest as m\n"
        "assert m.decode(m.encode(m.Body(created_by={'a': 'b'}))).body.created_by == {'a': 'b'}\n"
        "oaot.Verdict, oaot.ReasonCode, oaot.Manifest, oaot.AotError"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_can_fail():
    done = run("import orbax_aot.functions")
    assert done.returncode == 1 and "imported ['jax" in done.stderr


def test_all_public_names_are_there():
    import orbax_aot as oaot

    for name in oaot.__all__:
        assert getattr(oaot, name) is not None and name in dir(oaot)
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        _ = oaot.nobody

"""What the wheel and the sdist hold."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds both from a copy of what git tracks, so that nothing lying about gets in by chance."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\0")
    if not any(listed):
        pytest.skip("not a git checkout, so what belongs to the package cannot be told")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "src" / name)
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the package `build` (in the extra `dev`)")
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "src")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {
        str(p.relative_to(built / "src"))
        for p in (built / "src/orbax_aot").rglob("*")
        if p.is_file()
    }
    assert {n for n in names if ".dist-info/" not in n} == modules
    assert "orbax_aot/py.typed" in names
    about = {n.partition(".dist-info/")[2] for n in names if ".dist-info/" in n}
    assert about == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "top_level.txt",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_the_sdist_holds_what_builds_the_wheel_and_no_caches(built):
    (sdist,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "orbax_aot/__init__.py"} <= names
    assert not [n for n in names if "__pycache__" in n or n.endswith((".pyc", ".zst"))]


def test_the_version_is_told_once(built):
    (wheel,) = (built / "dist").glob("*.whl")
    from orbax_aot import __version__

    assert wheel.name.startswith(f"orbax_aot-{__version__}-py3-none-any")

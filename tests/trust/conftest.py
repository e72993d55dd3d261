"""One saved checkpoint for the tests of trust, copied for each that changes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trust_support as support

import orbax_aot as oaot


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash markers of the tests stay out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ORBAX_AOT_TRUST", raising=False)


@pytest.fixture(scope="session")
def saved_item(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An item with the function `step`; not to be changed."""
    item = tmp_path_factory.mktemp("saved") / "item"
    support.save(item, oaot.AotHandler())
    return item


@pytest.fixture
def item(saved_item: Path, tmp_path: Path) -> Path:
    """A copy of the item, to be changed."""
    return Path(shutil.copytree(saved_item, tmp_path / "item"))


@pytest.fixture
def make_item(saved_item: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes copies of the item, to be changed."""
    return lambda name: Path(shutil.copytree(saved_item, tmp_path / name))

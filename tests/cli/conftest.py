"""A checkpoint as training leaves it behind, made once."""

from __future__ import annotations

import pathlib
import shutil

import pytest


@pytest.fixture(scope="session")
def saved_root(tmp_path_factory) -> pathlib.Path:
    """A checkpoint root; do not write to it."""
    import cli_checkpoint

    return cli_checkpoint.save(tmp_path_factory.mktemp("saved") / "root")


@pytest.fixture
def root(saved_root, tmp_path) -> pathlib.Path:
    """A copy of the checkpoint, to be changed."""
    return shutil.copytree(saved_root, tmp_path / "root")

"""Processes: one that trains with the source, and others that serve without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import Child

HERE = Path(__file__).resolve().parent
PYTHONPATH = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))


def new_child(devices: int = 8, **env: str) -> Child:
    """Returns a process that can import the modules of this folder."""
    return Child(devices, env={"PYTHONPATH": PYTHONPATH, **env})


@pytest.fixture(scope="session")
def trainer():
    """The process with the source; the same for all tests that only need something saved."""
    with new_child() as child:
        yield child


@pytest.fixture(scope="session")
def trained(trainer, tmp_path_factory):
    """The folder of three models trained on a (2, 4) mesh, and what they computed after their save."""
    root = tmp_path_factory.mktemp("trained")
    return root, trainer.run("serve_training:train_all", root)


@pytest.fixture(scope="session")
def server():
    """A process of eight devices that has no model code and has compiled nothing."""
    with new_child() as child:
        yield child


@pytest.fixture(scope="session")
def lone_server():
    """The same with one device."""
    with new_child(devices=1) as child:
        yield child


@pytest.fixture
def start():
    """Starts fresh processes: `start(devices=4)`; they end with the test."""
    children = []

    def start_one(**options):
        children.append(new_child(**options))
        return children[-1]

    yield start_one
    for child in children:
        child.close()

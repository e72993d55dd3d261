"""Where in a checkpoint the executables lie: from a checkpoint root, a step or an item to the item. Imports no jax."""

from __future__ import annotations

import re

from etils import epath

from orbax_aot import store as store_lib
from orbax_aot.errors import NoExecutablesError

# `12`, `000012`, `step_12`: what Orbax's name formats write. Its temporary folders end in other ways.
_STEP = re.compile(r"(?:.*[_-])?(\d+)")
_STEP_FILE = "_CHECKPOINT_METADATA"
_STATE_FILE = "_METADATA"
_COMMIT_FILE = "commit_success.txt"


def find_item(path: epath.PathLike) -> epath.Path:
    """Returns the item with executables at `path`: a checkpoint root (its latest step), a step or an item.

    Raises:
      NoExecutablesError: there is none, or there are several; the message says which.
    """
    return _find(path, _holds_executables, "no executables (no _aot folder)")


def find_state_item(path: epath.PathLike) -> epath.Path:
    """As `find_item`, for the item that executables can be added to: one that has some, else one that holds a state.

    Raises:
      NoExecutablesError: there is none, or there are several; the message says which.
    """
    try:
        return find_item(path)
    except NoExecutablesError as e:
        if e.several:
            raise
    return _find(path, _holds_state, "no item that holds a state")


def _find(path: epath.PathLike, fits, problem: str) -> epath.Path:
    path = epath.Path(path)
    try:
        if not path.exists():
            raise NoExecutablesError(f"{path}: no such folder.")
        if fits(path):
            return path
        step = _latest_step(path)
        found = [child for child in sorted(step.iterdir()) if child.is_dir() and fits(child)]
    except NotADirectoryError as e:
        raise NoExecutablesError(f"{path}: not a folder.") from e
    if not found:
        where = f"{step}" if step == path else f"{step} (the latest step)"
        raise NoExecutablesError(
            f"{where}: {problem}. Name a checkpoint root, a step or an item that was saved with "
            "AotSave, or add functions by orbax_aot.attach."
        )
    if len(found) > 1:
        names = ", ".join(str(child) for child in found)
        raise NoExecutablesError(
            f"{step}: several items have executables; name one: {names}.", True
        )
    return found[0]


def _latest_step(path: epath.Path) -> epath.Path:
    """Returns the committed step of the highest number below a checkpoint root; `path` itself where it is a step."""
    if (path / _STEP_FILE).exists():
        return path
    steps = {
        int(match[1]): child for child in path.iterdir() if (match := _STEP.fullmatch(child.name))
    }
    for number in sorted(steps, reverse=True):
        if steps[number].is_dir() and _is_committed(steps[number]):
            return steps[number]
    return path


def _is_committed(step: epath.Path) -> bool:
    # A local step appears under its own name by a rename, when it is whole. Object stores have no rename.
    return not str(step).startswith("gs://") or (step / _COMMIT_FILE).exists()


def _holds_executables(path: epath.Path) -> bool:
    return store_lib.Store(path).exists()


def _holds_state(path: epath.Path) -> bool:
    return (path / _STATE_FILE).exists()

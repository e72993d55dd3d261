"""From a path that a person gives to the items that hold executables. Imports no jax."""

from __future__ import annotations

from etils import epath

from orbax_aot import store


def find_items(path: epath.PathLike) -> tuple[epath.Path, ...]:
    """Returns the items with executables: of a checkpoint directory's latest step, of a step, or the item itself.

    Raises:
      FileNotFoundError: there are none.
    """
    root = epath.Path(path)
    if _has_executables(root):
        return (root,)
    if root.is_dir():
        children = sorted(root.iterdir())
        if items := tuple(c for c in children if _has_executables(c)):
            return items
        steps = [c for c in children if _step_number(c) is not None and c.is_dir()]
        if steps:
            return find_items(max(steps, key=lambda c: _step_number(c) or 0))
    raise FileNotFoundError(f"{root}: no executables (no {store.FOLDER} folder).")


def _has_executables(path: epath.Path) -> bool:
    return (path / store.FOLDER / store.MANIFEST).exists()


def _step_number(path: epath.Path) -> int | None:
    digits = path.name.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None

"""What is in a checkpoint: read from the manifest alone. Imports no jax."""

from __future__ import annotations

from etils import epath

from orbax_aot import locations
from orbax_aot import manifest as m
from orbax_aot import store as store_lib


def inspect(path: epath.PathLike) -> m.Manifest:
    """Reads what a checkpoint says of its functions. Reads no executable, and imports no jax.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.

    Raises:
      NoExecutablesError: nothing was saved there, or several items were.
      CorruptArtifactError: the manifest is damaged.
    """
    return store_lib.Store(locations.find_item(path)).read_manifest()

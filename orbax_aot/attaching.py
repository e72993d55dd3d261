"""Adding functions to a step that is committed already."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
from absl import logging
from etils import epath

from orbax_aot import handler as handler_lib
from orbax_aot import locations, saving
from orbax_aot import manifest as m
from orbax_aot import store as store_lib
from orbax_aot.editing import Edit
from orbax_aot.errors import AotError
from orbax_aot.version import __version__


def attach(
    path: epath.PathLike,
    fns: Mapping[str, Any],
    *,
    portable: bool | Sequence[str] = True,
) -> m.Manifest:
    """Adds functions to a committed step, saved by plain Orbax or by `AotSave`. The weights are not touched.

    A function that is there already under the same name is replaced, with all its signatures; `prune` then removes
    its files. A concurrent reader sees the step as it was or as it is afterwards. Blocks until it is done. In a job of
    several processes, one calls it.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      fns: as in `AotSave`.
      portable: as in `AotSave`.

    Returns:
      The new manifest.

    Raises:
      TypeError: `fns` holds what cannot be saved.
      AotError: a function was never called or compiled.
      NotSerializableError: a function holds what plain data cannot describe. Nothing has changed then.
      NoExecutablesError: `path` leads to no item, or to several.
      StepChangedError: another writer was faster; nothing has changed.
    """
    asked = handler_lib.AotSave(fns=fns, portable=portable)
    edit = Edit(locations.find_state_item(path))
    for name, fn in (asked.fns or {}).items():
        executables = saving.executables_of(fn, name)
        if not executables:
            raise AotError(
                f"{name}: never called or compiled, so there is nothing to attach; call its .compile(…) first."
            )
        folder = store_lib.folder_name(name)
        signatures = []
        for executable in executables:
            artifact = executable.pack(asked.portable)
            signatures.append(edit.add_files(artifact, f"{folder}/{len(signatures)}"))
        edit.functions[name] = m.Function(folder=folder, signatures=tuple(signatures))
        logging.info(
            "%s: attached %s with %d signatures.", edit.store.folder, name, len(signatures)
        )
    about = {
        "orbax_aot": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "host": platform.node(),
    }
    return edit.commit(about)

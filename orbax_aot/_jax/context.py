"""The trace context of one thread, taken to another.

JAX keeps config contexts and meshes for each thread. What a step was traced under on the training thread must be in
force where its program is lowered once more, on the thread of a commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


class ThreadContext:
    """What of JAX's settings is local to the thread that makes this, to be entered on another.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """

    def __init__(self) -> None:
        from jax._src import config
        from jax._src import mesh as mesh_lib

        self._settings = [
            (setting, value)
            for setting in vars(config).values()
            if isinstance(setting, config.config_ext.Config)
            and (value := setting.get_local()) is not config.config_ext.unset
        ]
        concrete = mesh_lib.get_concrete_mesh()
        self._mesh = None if concrete is None or concrete.empty else concrete
        abstract = mesh_lib.get_abstract_mesh()
        self._abstract = None if self._mesh is not None or abstract.empty else abstract

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts the settings in force on this thread."""
        with contextlib.ExitStack() as stack:
            if self._mesh is not None:
                stack.enter_context(jax.set_mesh(self._mesh))
            elif self._abstract is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(self._abstract))
            for setting, value in self._settings:
                stack.callback(setting.set_local, setting.swap_local(value))
            yield


def entered(context: ThreadContext | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager for a context that may be missing."""
    return contextlib.nullcontext() if context is None else context.entered()

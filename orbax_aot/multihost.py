"""One decision for all processes of a job.

Each process publishes its view, and a barrier of JAX's coordination service says whether all did: where one did not
come in time, the barrier fails for every process alike, so that none goes on alone and none waits for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import msgspec
from absl import logging

from orbax_aot import agreement
from orbax_aot._jax import distributed

_PREFIX = "orbax_aot"
# Restores happen in the same order in every process of a job, as Orbax needs it, too.
_restores = itertools.count()


class MissingProcessError(Exception):
    """Not all processes gave their view in time; the message names those that did not."""


class Group:
    """The processes of one restore, agreeing several times, in the same order in each of them."""

    def __init__(self, timeout_secs: float):
        self._client = distributed.coordination_client()
        self._timeout_ms = max(1, int(timeout_secs * 1000))
        self._name = f"{_PREFIX}/{next(_restores)}"
        self.index = jax.process_index()
        self.count = jax.process_count()

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._client is None

    def exchange(self, topic: str, view: agreement.View) -> list[agreement.View]:
        """Publishes this process's view and returns those of all, by process index. Blocks.

        Raises:
          MissingProcessError: not all came in time; raised in every process that did come.
        """
        if self._client is None:
            return [view]
        folder = f"{self._name}/{topic}"
        self._client.key_value_set(f"{folder}/{self.index}", msgspec.json.encode(view).decode())
        try:
            self._client.wait_at_barrier(f"{folder}/all", self._timeout_ms)
        except Exception as e:
            missing = sorted(set(range(self.count)) - set(self._who_came(folder)))
            logging.warning("orbax_aot: no agreement on %s: %s", topic, e)
            raise MissingProcessError(
                f"process {', '.join(map(str, missing)) or 'unknown'} did not answer in "
                f"{self._timeout_ms / 1000:g} s"
            ) from e
        return [
            msgspec.json.decode(
                self._client.blocking_key_value_get(f"{folder}/{i}", self._timeout_ms),
                type=agreement.View,
            )
            for i in range(self.count)
        ]

    def _who_came(self, folder: str) -> Sequence[int]:
        try:
            keys = [key for key, _ in self._client.key_value_dir_get(f"{folder}/")]  # type: ignore[union-attr]
        except Exception:
            return ()
        return [int(k.rpartition("/")[2]) for k in keys if k.rpartition("/")[2].isdigit()]

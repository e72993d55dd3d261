"""JAX's distributed runtime: who is in the job, and its coordination service."""

from __future__ import annotations

from typing import Any

import jax


def coordination_client() -> Any | None:
    """Returns the client of the coordination service; None in a job of one process.

    Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
    """
    if jax.process_count() == 1:
        return None
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client

"""What happened while a block ran: log records and JAX's monitoring events."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax

# JAX's own events for tracing, lowering and compiling; each tells which function by `fun_name`.
WORK_EVENTS = frozenset(
    {
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    }
)


@dataclasses.dataclass
class Watched:
    """`records` are log records of this package's modules; `events` are `(name, {keyword: value})`."""

    records: list[logging.LogRecord] = dataclasses.field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)

    def lines(self, level: int = logging.INFO) -> list[str]:
        """Returns `LEVEL message` of the records at `level` or above."""
        return [f"{r.levelname} {r.getMessage()}" for r in self.records if r.levelno >= level]

    def tracebacks(self) -> list[str]:
        return [r.getMessage() for r in self.records if r.exc_info]

    def work(self, function: str | None = None) -> list[str]:
        """Returns the names of JAX's trace, lower and compile events, of one function or of all."""
        return [
            name
            for name, about in self.events
            if name in WORK_EVENTS
            and (function is None or function in str(about.get("fun_name", "")))
        ]

    def named(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        return [(name, about) for name, about in self.events if name.startswith(prefix)]


class _Handler(logging.Handler):
    def __init__(self, watched: Watched):
        super().__init__(level=logging.DEBUG)
        self.watched = watched

    def emit(self, record: logging.LogRecord) -> None:
        if "orbax_aot" in record.pathname.replace("\\", "/").split("/"):
            self.watched.records.append(record)


_watching: list[Watched] = []
_registered = threading.Lock()
_done: list[bool] = []


def _register() -> None:
    with _registered:
        if not _done:
            jax.monitoring.register_event_listener(_listen)
            jax.monitoring.register_event_duration_secs_listener(
                lambda name, secs, **about: _listen(name, secs=secs, **about)
            )
            _done.append(True)


def _listen(name: str, **about: Any) -> None:
    for watched in list(_watching):
        watched.events.append((name, about))


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Gathers log records and events of all threads while the block runs."""
    _register()
    watched = Watched()
    handler = _Handler(watched)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    _watching.append(watched)
    try:
        yield watched
    finally:
        _watching.remove(watched)
        logger.removeHandler(handler)
        logger.setLevel(level)

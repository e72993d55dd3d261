"""When a restore did what: spans of time, as a Chrome trace or as a picture. Imports no jax."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

_PICTURES = (".png", ".svg", ".pdf")
_COLOURS = {
    "decide": "tab:gray",
    "weights": "tab:blue",
    "read": "tab:cyan",
    "load": "tab:green",
    "rebuild": "tab:orange",
    "trace and lower": "tab:purple",
    "compile": "tab:red",
}


@dataclasses.dataclass(frozen=True)
class Span:
    """`what` was done for `lane` (a function's signature, or the state), in seconds since the restore began."""

    lane: str
    what: str
    start: float
    end: float


class Timeline:
    """The spans of one restore and of the calls that followed from it. Threads may add at once."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, lane: str, what: str) -> Iterator[None]:
        """Notes when its body ran, also where that raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, what, start)

    def add(self, lane: str, what: str, start: float) -> None:
        """Notes what began at `start`, as `time.perf_counter` tells it, and ends now."""
        now = time.perf_counter()
        with self._lock:
            self._spans.append(Span(lane, what, start - self._began, now - self._began))

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans that have ended, by their start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.start))

    def as_trace(self) -> dict[str, Any]:
        """Returns the spans in the trace event format that chrome://tracing and ui.perfetto.dev read."""
        spans = self.spans
        lanes = _lanes(spans)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "restore"}}
        ]
        for number, lane in enumerate(lanes):
            named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": number}
            order = {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number}
            events += [{**named, "args": {"name": lane}}, {**order, "args": {"sort_index": number}}]
        events += [
            {
                "ph": "X",
                "name": span.what,
                "cat": "orbax_aot",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
            }
            for span in spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: epath.PathLike) -> None:
        """Writes a trace (`.json`) or a picture (`.png`, `.svg`, `.pdf`; needs matplotlib).

        Raises:
          ValueError: another ending.
          ModuleNotFoundError: a picture, and matplotlib is not installed.
        """
        target = epath.Path(path)
        if target.suffix == ".json":
            target.write_text(json.dumps(self.as_trace()))
        elif target.suffix in _PICTURES:
            target.write_bytes(self._draw(target.suffix[1:]))
        else:
            raise ValueError(
                f"{path}: a timeline is written as .json, {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}."
            )

    def _draw(self, kind: str) -> bytes:
        import io

        try:
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
            from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as e:
            raise ModuleNotFoundError(
                "A picture of a timeline needs matplotlib; install it, or write a .json and open that in "
                "ui.perfetto.dev."
            ) from e
        spans = self.spans
        lanes = _lanes(spans)
        figure = Figure(figsize=(9, 1.4 + 0.4 * max(1, len(lanes))), layout="constrained")
        axes = figure.add_subplot()
        for span in spans:
            axes.barh(
                lanes.index(span.lane),
                max(span.end - span.start, 1e-4),
                left=span.start,
                height=0.6,
                color=_COLOURS.get(span.what, "tab:brown"),
            )
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)  # the first lane on top
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds since the restore began")
        axes.spines[["top", "right"]].set_visible(False)
        kinds = dict.fromkeys(span.what for span in spans)
        figure.legend(
            handles=[Patch(color=_COLOURS.get(k, "tab:brown"), label=k) for k in kinds],
            loc="outside upper center",
            ncols=max(1, len(kinds)),
            frameon=False,
        )
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150)
        return out.getvalue()


def _lanes(spans: tuple[Span, ...]) -> list[str]:
    """Returns the lanes in the order in which something first happened in them."""
    return list(dict.fromkeys(span.lane for span in spans))

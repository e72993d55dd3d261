"""What people read after a restore: verdicts, reasons and the report that holds them. Imports no jax."""

from __future__ import annotations

import dataclasses
import enum
import html
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etils import epath

    from orbax_aot.timeline import Timeline


class Verdict(enum.Enum):
    """What became of a saved function, from best to worst."""

    LOADED = "loaded"
    REMAPPED = "remapped"
    REBUILT = "rebuilt"
    RECOMPILED = "recompiled"
    PENDING = "pending"
    REFUSED = "refused"

    @property
    def rank(self) -> int:
        return list(Verdict).index(self)

    def __str__(self) -> str:
        return self.name


class ReasonCode(enum.Enum):
    """Why an executable was not simply loaded. One page of the documentation each."""

    DEVICE_COUNT = "DEVICE_COUNT"
    MESH_SHAPE = "MESH_SHAPE"
    DEVICE_KIND = "DEVICE_KIND"
    DEVICE_LAYOUT = "DEVICE_LAYOUT"
    PLATFORM = "PLATFORM"
    PLATFORM_VERSION = "PLATFORM_VERSION"
    JAX_VERSION = "JAX_VERSION"
    CPU_FEATURES = "CPU_FEATURES"
    XLA_FLAGS = "XLA_FLAGS"
    COMPILE_OPTIONS = "COMPILE_OPTIONS"
    JAX_CONFIG = "JAX_CONFIG"
    CODE_CHANGED = "CODE_CHANGED"
    CODE_UNDECIDABLE = "CODE_UNDECIDABLE"
    PROGRAM_CHANGED = "PROGRAM_CHANGED"
    SIGNATURE_CHANGED = "SIGNATURE_CHANGED"
    NOT_COMPARABLE = "NOT_COMPARABLE"
    CORRUPT = "CORRUPT"
    UNTRUSTED = "UNTRUSTED"
    FORMAT_VERSION = "FORMAT_VERSION"
    NEEDS_SOURCE = "NEEDS_SOURCE"
    NOT_SERIALIZABLE = "NOT_SERIALIZABLE"
    NOT_SAVED = "NOT_SAVED"
    NEVER_CALLED = "NEVER_CALLED"
    LOAD_FAILED = "LOAD_FAILED"
    TIMEOUT = "TIMEOUT"
    OTHER_PROCESS = "OTHER_PROCESS"
    DISABLED = "DISABLED"

    def __str__(self) -> str:
        return self.name


# What someone should look into; the other codes are what a job may expect.
ALARMING = frozenset(
    {
        ReasonCode.CORRUPT,
        ReasonCode.UNTRUSTED,
        ReasonCode.LOAD_FAILED,
        ReasonCode.TIMEOUT,
    }
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One difference: its code, and what was saved against what is here, as people should read them."""

    code: ReasonCode
    saved: str = ""
    current: str = ""

    def __str__(self) -> str:
        if self.saved and self.current:
            return f"{self.code}: saved {self.saved}, here {self.current}"
        return (
            f"{self.code}: {self.saved or self.current}"
            if self.saved or self.current
            else f"{self.code}"
        )


@dataclasses.dataclass(frozen=True)
class FunctionReport:
    """What became of one function.

    `seconds` is what loading, rebuilding or compiling took so far; `nbytes` the raw size of what was loaded;
    `signatures` the verdicts of its saved signatures, in the manifest's order.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    seconds: float = 0.0
    nbytes: int = 0
    signatures: tuple[Verdict, ...] = ()
    checked_by: str = ""

    def __str__(self) -> str:
        why = "; ".join(map(str, self.reasons))
        return f"{self.verdict} in {self.seconds:.2f} s" + (f" ({why})" if why else "")


_COLUMNS = ("function", "verdict", "seconds", "kB", "reason")
_NUMERIC = ("seconds", "kB")
_STYLES = {Verdict.LOADED: "green", Verdict.REMAPPED: "green", Verdict.REFUSED: "red"}
_HTML_COLOURS = {Verdict.LOADED: "#1a7f37", Verdict.REMAPPED: "#1a7f37", Verdict.REFUSED: "#cf222e"}


class RestoreReport(Mapping[str, FunctionReport]):
    """What became of each function of a restore, by name.

    Live: reading it waits for loads under way, and a call that compiles something adds to it.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, FunctionReport]],
        note: str = "",
        timeline: Timeline | None = None,
    ):
        self._read = read
        self.note = note
        self._timeline = timeline
        self._lock = threading.Lock()

    def _reports(self) -> dict[str, FunctionReport]:
        with self._lock:
            return self._read()

    def __getitem__(self, name: str) -> FunctionReport:
        return self._reports()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports())

    def __len__(self) -> int:
        return len(self._reports())

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data that JSON can hold."""
        return {
            name: {
                "verdict": report.verdict.name,
                "reasons": [
                    {"code": r.code.name, "saved": r.saved, "current": r.current}
                    for r in report.reasons
                ],
                "seconds": report.seconds,
                "nbytes": report.nbytes,
                "signatures": [v.name for v in report.signatures],
                "checked_by": report.checked_by,
            }
            for name, report in self._reports().items()
        }

    def timeline(self, path: epath.PathLike) -> None:
        """Writes what was read, loaded, traced and compiled when, against the weights; waits for loads under way.

        A `.json` file is a trace for ui.perfetto.dev or chrome://tracing; `.png`, `.svg` and `.pdf` are pictures, which
        need matplotlib.

        Raises:
          ValueError: `path` ends in something else, or nothing was restored, as in a report of `check`.
          ModuleNotFoundError: a picture, and matplotlib is not installed.
        """
        if self._timeline is None:
            raise ValueError("Nothing was restored, so there is no timeline.")
        self._reports()
        self._timeline.write(path)

    def summary(self) -> str:
        """Returns one line for a log: verdicts with the functions they are of, and the codes of their reasons."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, report in sorted(self._reports().items()):
            codes = ", ".join(dict.fromkeys(str(r.code) for r in report.reasons))
            groups.setdefault((str(report.verdict), codes), []).append(name)
        parts = [
            f"{verdict}{f' ({codes})' if codes else ''}: {', '.join(names)}"
            for (verdict, codes), names in groups.items()
        ]
        return "; ".join(parts) or self.note or "no functions"

    def __str__(self) -> str:
        if not self._reports():
            return self.note or "no functions"
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=120, no_color=True, highlight=False, markup=False)
        console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())

    def __rich__(self) -> Any:
        """Returns a table for `rich`, which prints it in colours where the terminal has them."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in _COLUMNS:
            numeric = column in _NUMERIC
            table.add_column(
                column, justify="right" if numeric else "left", no_wrap=column != "reason"
            )
        for row, verdict in self._rows():
            cells = [Text(cell) for cell in row]
            cells[1].stylize(_STYLES.get(verdict, "yellow"))
            table.add_row(*cells)
        return Group(Text(self.note), table) if self.note else table

    def _repr_html_(self) -> str:
        """Returns a table for notebooks."""
        if not self._reports():
            return f"<p>{html.escape(self.note or 'no functions')}</p>"
        align = lambda column: "right" if column in _NUMERIC else "left"
        cell = lambda tag, column, text: (
            f'<{tag} style="text-align:{align(column)};vertical-align:top">{text}</{tag}>'
        )
        lines = [f"<p>{html.escape(self.note)}</p>"] if self.note else []
        lines.append("<table>")
        heads = "".join(cell("th", c, c) for c in _COLUMNS)
        lines.append(f"<thead><tr>{heads}</tr></thead><tbody>")
        for row, verdict in self._rows():
            texts = [html.escape(text) for text in row]
            colour = _HTML_COLOURS.get(verdict, "#9a6700")
            texts[1] = f'<b style="color:{colour}">{texts[1]}</b>'
            cells = "".join(cell("td", c, t) for c, t in zip(_COLUMNS, texts, strict=True))
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody></table>")
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[tuple[str, ...], Verdict]]:
        for name, report in sorted(self._reports().items()):
            why = "; ".join(map(str, report.reasons)) or report.checked_by
            size = f"{report.nbytes / 1000:.0f}" if report.nbytes else ""
            yield (name, str(report.verdict), f"{report.seconds:.2f}", size, why), report.verdict

    def __repr__(self) -> str:
        return f"RestoreReport({ {n: str(r.verdict) for n, r in self._reports().items()} })"

"""What JSON leaves open, decided strictly: no name twice, no number out of range, no endless nesting.

Two readers of one document must never see two different things, and no document may exhaust its reader. `msgspec`
checks types; it lets the last of two equal names win and takes numbers of any length.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

MAX_DEPTH = 200
MAX_CONTAINERS = 2_000_000  # lists and objects; each takes some 100 bytes once read
_MAX_DIGITS = 19  # 64 bits; the fingerprints of executables, which are longer, are strings
_MAX_NUMBER = 64

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class StrictJsonError(ValueError):
    """A document that is no strict JSON; the message ends with the JSON path."""


class _Flaw:
    """Stands in a parsed document where something is wrong, so that its path can be told."""

    def __init__(self, what: str):
        self.what = what


def require(data: bytes) -> None:
    """Raises `StrictJsonError` unless `data` is one strict JSON document in UTF-8."""
    _require_bounded(data)
    flaws: list[_Flaw] = []

    def flaw(what: str) -> _Flaw:
        flaws.append(_Flaw(what))
        return flaws[-1]

    def pairs(items: list[tuple[str, Any]]) -> Any:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(n for n, _ in items if n in seen or seen.add(n))
            found[twice] = flaw("the name is there twice")
        return found

    def integer(text: str) -> Any:
        if len(text.lstrip("-")) > _MAX_DIGITS:
            return flaw(f"a number of {len(text)} digits")
        return 0

    def real(text: str) -> Any:
        if len(text) > _MAX_NUMBER or not math.isfinite(float(text)):
            return flaw("a number out of range")
        return 0.0

    try:
        parsed = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=lambda name: flaw(f"{name} is no JSON"),
        )
    except UnicodeDecodeError as e:
        raise StrictJsonError(f"not UTF-8 (byte {e.start}) - at `$`") from e
    except (ValueError, RecursionError) as e:
        raise StrictJsonError(f"{e} - at `$`") from e
    if flaws:
        raise StrictJsonError(f"{flaws[0].what} - at `{_find_path(parsed)}`")


def _require_bounded(data: bytes) -> None:
    """Raises `StrictJsonError` for brackets too many or nested too deeply, before anything follows them."""
    brackets = _STRINGS.sub(b"", data).translate(None, _ALL_BUT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise StrictJsonError(f"more than {MAX_CONTAINERS} lists and objects - at `$`")
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise StrictJsonError(f"nested {depth} deep, at most {MAX_DEPTH} - at `$`")


def _find_path(parsed: Any) -> str:
    """Returns the JSON path of the first flaw."""
    pending: list[tuple[Any, str]] = [(parsed, "$")]
    while pending:
        value, path = pending.pop()
        if isinstance(value, _Flaw):
            return path
        if isinstance(value, dict):
            pending += [(v, f"{path}.{k}") for k, v in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(v, f"{path}[{i}]") for i, v in reversed(list(enumerate(value)))]
    return "$"

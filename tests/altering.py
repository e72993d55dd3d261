"""Edits a saved `_aot` folder as a hostile or unlucky hand would. Knows the format from its description only."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def manifest_path(step: str | Path) -> Path:
    return Path(step) / "default" / "_aot" / "manifest.json"


def read_body(step: str | Path) -> Any:
    return json.loads(manifest_path(step).read_text())["body"]


def manifest_bytes(body: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    """Returns a manifest with a right digest of `body`."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = json.dumps({"format": "orbax-aot", "version": list(version), "sha256": digest})
    return f'{head[:-1]},"body":{text}}}'.encode()


def write_body(step: str | Path, body: Any) -> None:
    manifest_path(step).write_bytes(manifest_bytes(body))


def variants(body: Any) -> Iterator[dict[str, Any]]:
    for function in body["functions"].values():
        for signature in function.get("signatures", ()):
            yield from signature.get("variants", ())


def alter_variants(body: Any, keys: list[str], value: Any) -> Any:
    """Returns a copy of `body` in which each variant has `value` at `keys`, or what it makes of the old one."""
    body = copy.deepcopy(body)
    for variant in variants(body):
        *parents, last = keys
        node = variant
        for key in parents:
            node = node[key]
        new = value(node[last]) if callable(value) else value
        assert node.get(last) != new, f"{keys} is {new!r} already: the case changes nothing"
        node[last] = new
    return body


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Returns all parts of a JSON value below the top, containers too, with their paths."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items:
        yield (*path, key), child
        if isinstance(child, dict | list):
            yield from leaves(child, (*path, key))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of a JSON value with another value at `path`."""
    node = copy.copy(node)
    node[path[0]] = value if len(path) == 1 else replaced(node[path[0]], path[1:], value)
    return node


def mutations(value: Any) -> list[Any]:
    """Returns values of the same JSON type that mean something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, -1, 1 << 40]
    if isinstance(value, float):
        return [value + 1.0]
    if isinstance(value, str):
        return ["", value + "x", "../" + value]
    if value is None:
        return [0, "x", []]
    if isinstance(value, list):
        return [[], *([value[:-1], [*value, value[-1]], value[::-1]] if value else [])]
    return [{}]

"""A second reader of `_aot` folders, written from `docs/format.md` alone: standard library and `zstandard` only.

    python tests/independent_reader.py ITEM

Reads the manifest and every file that it names, checks all digests and bounds, and prints what there is. It proves that
the specification suffices; it shares no code with the package.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from typing import Any

import zstandard

_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_MAX_MANIFEST = 64 * 2**20
_MAX_FILE = 16 * 2**30
_FREE = 64 * 2**20
_MAX_RATIO = 256


class Refused(Exception):
    """The folder is not what the specification allows."""


def read_manifest(item: str) -> dict[str, Any]:
    """Returns the body of the manifest; `{}` for a newer major version."""
    data = _read(os.path.join(item, "_aot"), "manifest.json", _MAX_MANIFEST)
    document = _parse(data)
    if not isinstance(document, dict) or document.get("format") != "orbax-aot":
        raise Refused("another format")
    version = document.get("version")
    if not (
        isinstance(version, list) and len(version) == 2 and all(type(n) is int for n in version)
    ):
        raise Refused("no version")
    if hashlib.sha256(_body_text(data)).hexdigest() != document.get("sha256"):
        raise Refused("the digest of the body")
    if version[0] != 1:
        return {}
    return document["body"]


def read_files(item: str, body: dict[str, Any]) -> dict[str, bytes]:
    """Returns the raw bytes of all files that a manifest names, by their names in the folder."""
    found: dict[str, bytes] = {}
    for function in body.get("functions", {}).values():
        for signature in function.get("signatures", ()):
            prefix = f"{function['folder']}/{signature['folder']}"
            entries = [*signature.get("variants", ())]
            if signature.get("portable"):
                entries.append(signature["portable"])
            for entry in entries:
                for constant in entry.get("constants", ()):
                    found[constant["file"]] = _unpack(item, constant["file"], constant)
                found[f"{prefix}/{entry['file']}"] = _unpack(
                    item, f"{prefix}/{entry['file']}", entry
                )
    return found


def _unpack(item: str, name: str, entry: dict[str, Any]) -> bytes:
    for key in ("nbytes", "raw_nbytes"):
        if type(entry[key]) is not int or not 0 <= entry[key] <= _MAX_FILE:
            raise Refused(f"{name}: {key}")
    stored = _read(os.path.join(item, "_aot"), name, entry["nbytes"])
    if len(stored) != entry["nbytes"] or hashlib.sha256(stored).hexdigest() != entry["sha256"]:
        raise Refused(f"{name}: the stored bytes")
    cuts = [(cut["at"], _unpack(item, cut["file"], cut)) for cut in entry.get("cuts", ())]
    nbytes = entry["raw_nbytes"] - sum(len(part) for _, part in cuts)
    raw = _decompress(name, stored, entry["codec"], nbytes)
    for at, part in cuts:  # ascending; each offset is one of the whole
        if not 0 <= at <= len(raw):
            raise Refused(f"{name}: a cut")
        raw = raw[:at] + part + raw[at:]
    if len(raw) != entry["raw_nbytes"] or hashlib.sha256(raw).hexdigest() != entry["raw_sha256"]:
        raise Refused(f"{name}: the raw bytes")
    return raw


def _decompress(name: str, stored: bytes, codec: str, nbytes: int) -> bytes:
    if codec == "raw":
        return stored
    if codec != "zstd" or nbytes > max(_FREE, _MAX_RATIO * len(stored)):
        raise Refused(f"{name}: codec or ratio")
    try:
        if zstandard.get_frame_parameters(stored).content_size != nbytes:
            raise Refused(f"{name}: the size in the frame")
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(
            stored, max_output_size=nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as e:
        raise Refused(f"{name}: {e}") from e


def _read(folder: str, name: str, limit: int) -> bytes:
    """Reads a plain file in the folder, through no link."""
    parts = name.split("/")
    if len(parts) > 4 or not all(
        len(p) <= 160 and ".." not in p and _NAME.fullmatch(p) for p in parts
    ):
        raise Refused(f"the name {name[:80]!r}")
    path = folder
    for part in ("", *parts):
        path = os.path.join(path, part) if part else path
        if not os.path.lexists(path) or os.path.islink(path):
            raise Refused(f"{name}: missing, or a link")
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise Refused(f"{name}: no plain file, or too large")
    with open(path, "rb") as f:
        return f.read()


def _parse(data: bytes) -> Any:
    """Parses strict JSON."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise Refused("a name twice")
        return dict(items)

    def number(text: str) -> Any:
        value = float(text)
        if value in (float("inf"), float("-inf")) or len(text) > 64:
            raise Refused("a number out of range")
        return value

    def integer(text: str) -> int:
        if len(text.lstrip("-")) > 19:
            raise Refused("a number out of range")
        return int(text)

    def constant(text: str) -> None:
        raise Refused(text)

    try:
        text = data.decode("utf-8")
        _require_shallow(text)
        if "\ud800" <= max(text, default="") <= "\udfff" or re.search(r"\\u[dD][89a-fA-F]", text):
            _require_whole_characters(text)
        return json.loads(
            text,
            object_pairs_hook=pairs,
            parse_float=number,
            parse_int=integer,
            parse_constant=constant,
        )
    except (ValueError, RecursionError) as e:
        raise Refused(f"no JSON: {e}") from e


def _require_whole_characters(text: str) -> None:
    halves = re.findall(r"\\u([dD][89abAB]..)(\\u[dD][c-fC-F]..)?|\\u([dD][c-fC-F]..)", text)
    if any(not low or lone for _, low, lone in halves):
        raise Refused("half a character")


def _require_shallow(text: str) -> None:
    depth = containers = 0
    for bracket in re.sub(r'"(?:[^"\\]|\\.)*"', "", text, flags=re.DOTALL):
        if bracket in "[{":
            depth, containers = depth + 1, containers + 1
        elif bracket in "]}":
            depth -= 1
        if depth > 200 or containers > 2_000_000:
            raise Refused("too deep, or too much")


def _body_text(data: bytes) -> bytes:
    """Returns the bytes of the value of `body` as they stand in the file."""
    text = data.decode("utf-8")
    decoder = json.JSONDecoder()
    space = re.compile(r"[ \t\n\r]*")
    at = space.match(text, 0).end() + 1  # type: ignore[union-attr]
    while True:
        at = space.match(text, at).end()  # type: ignore[union-attr]
        name, at = decoder.raw_decode(text, at)
        at = space.match(text, at).end() + 1  # type: ignore[union-attr]
        start = space.match(text, at).end()  # type: ignore[union-attr]
        _, at = decoder.raw_decode(text, start)
        if name == "body":
            return text[start:at].encode("utf-8")
        at = space.match(text, at).end() + 1  # type: ignore[union-attr]
        if at >= len(text):
            raise Refused("no body")


def main() -> None:
    body = read_manifest(sys.argv[1])
    for name, function in sorted(body.get("functions", {}).items()):
        if "absent" in function:
            print(f"{name}: absent ({function['absent']['code']}: {function['absent']['detail']})")
        for signature in function.get("signatures", ()):
            inputs = ", ".join(
                f"{i['path']}: {i['dtype']}{i['shape']}" for i in signature["inputs"]
            )
            print(f"{name}({inputs})")
    for name, raw in sorted(read_files(sys.argv[1], body).items()):
        print(f"{len(raw):>10}  {name}")


if __name__ == "__main__":
    main()

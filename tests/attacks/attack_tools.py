"""What the attacks of the corpus share: reading a manifest, and writing it with the digest repaired."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import zstandard

PAYLOAD = "step/0/0.pjrt.zst"
PORTABLE = "step/0/portable.stablehlo.zst"


def read_body(aot: Path) -> Any:
    return json.loads((aot / "manifest.json").read_bytes())["body"]


def write_text(aot: Path, text: bytes, version: Any = (1, 0)) -> None:
    """Writes a manifest around the bytes of a body, with their digest."""
    head = {"format": "orbax-aot", "version": version, "sha256": hashlib.sha256(text).hexdigest()}
    (aot / "manifest.json").write_bytes(json.dumps(head)[:-1].encode() + b',"body":' + text + b"}")


def write_body(aot: Path, body: Any, version: Any = (1, 0)) -> None:
    write_text(aot, compact(body), version)


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def signature(body: Any) -> Any:
    return body["functions"]["step"]["signatures"][0]


def variant(body: Any) -> Any:
    return signature(body)["variants"][0]


def rename_payload(aot: Path, name: str) -> None:
    """Says that the payload has this name."""
    body = read_body(aot)
    variant(body)["file"] = name
    write_body(aot, body)


def describe(entry: Any, stored: bytes, raw: bytes) -> None:
    """Makes an entry of the manifest fit a file."""
    entry.update(
        sha256=hashlib.sha256(stored).hexdigest(),
        raw_sha256=hashlib.sha256(raw).hexdigest(),
        nbytes=len(stored),
        raw_nbytes=len(raw),
    )


def replace_payload(aot: Path, stored: bytes, raw: bytes) -> None:
    """Puts other bytes in the place of the payload, with all digests repaired."""
    (aot / PAYLOAD).write_bytes(stored)
    body = read_body(aot)
    describe(variant(body), stored, raw)
    write_body(aot, body)


def compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw)


def compressed_zeros(nbytes: int) -> bytes:
    """Returns so many zeros, compressed, without ever holding them."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=nbytes)
    chunk = bytes(1 << 24)
    parts = [compressor.compress(chunk) for _ in range(nbytes // len(chunk))]
    return b"".join([*parts, compressor.flush()])

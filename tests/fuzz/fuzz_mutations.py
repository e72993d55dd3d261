"""Ways to damage an `_aot` folder. Each takes a random generator and changes the folder in place.

An `Artifact` is a folder with the bytes of another one at hand to splice from. What a mutation did is told by its name;
a case is given by its tier and its seed alone, so that each can be run again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

Mutation = Callable[["Artifact", random.Random], None]
SIGNATURE_FILES = ("manifest.sig", "item.json")


@dataclasses.dataclass
class Artifact:
    """The folder to damage, and another step's to take parts from."""

    folder: Path
    other: Path

    def files(self) -> list[str]:
        found = [str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()]
        return sorted(found)

    def payloads(self) -> list[str]:
        return [name for name in self.files() if name.endswith(".zst")]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def body(self) -> Any:
        return json.loads(self.read("manifest.json"))["body"]


# -- bytes -----------------------------------------------------------------------------------------------------------


def _damage(data: bytes, rng: random.Random) -> bytes:
    """Returns `data` with one kind of damage."""
    kind = rng.choice(("flip", "byte", "zero", "cut", "insert", "double", "empty", "tail"))
    at = rng.randrange(len(data) or 1)
    n = 1 + int(rng.random() ** 3 * min(len(data), 4096))
    if kind == "empty" or not data:
        return b"" if data else b"x"
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == "byte":
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if kind == "zero":
        return data[:at] + bytes(min(n, len(data) - at)) + data[at + n :]
    if kind == "cut":
        return data[:at] + data[at + n :]
    if kind == "insert":
        return data[:at] + rng.randbytes(n) + data[at:]
    if kind == "double":
        return data[:at] + data[at : at + n] + data[at:]
    return data[:at]


def damage_file(artifact: Artifact, rng: random.Random) -> None:
    name = rng.choice(artifact.files())
    artifact.write(name, _damage(artifact.read(name), rng))


def swap_files(artifact: Artifact, rng: random.Random) -> None:
    files = artifact.files()
    one, two = rng.sample(files, 2)
    a, b = artifact.read(one), artifact.read(two)
    artifact.write(one, b)
    artifact.write(two, a)


def splice_file(artifact: Artifact, rng: random.Random) -> None:
    """Puts a file of another step in the place of one."""
    others = [p for p in sorted(artifact.other.rglob("*")) if p.is_file()]
    target = rng.choice(artifact.files())
    same = [p for p in others if str(p.relative_to(artifact.other)) == target]
    source = rng.choice(same if same and rng.random() < 0.7 else others)
    artifact.write(target, source.read_bytes())


def splice_bytes(artifact: Artifact, rng: random.Random) -> None:
    """Puts a range of one file into another."""
    one, two = (artifact.read(n) for n in rng.sample(artifact.files(), 2))
    a, b = rng.randrange(len(one) or 1), rng.randrange(len(two) or 1)
    n = rng.randrange(1, 512)
    name = next(name for name in artifact.files() if artifact.read(name) == one)
    artifact.write(name, one[:a] + two[b : b + n] + one[a + n :])


def delete_file(artifact: Artifact, rng: random.Random) -> None:
    (artifact.folder / rng.choice(artifact.files())).unlink()


def rename_file(artifact: Artifact, rng: random.Random) -> None:
    name = rng.choice(artifact.files())
    path = artifact.folder / name
    path.rename(
        path.with_name(rng.choice((path.name.upper() + "x", "x" + path.name, "é", "...", "CON")))
    )


def link_file(artifact: Artifact, rng: random.Random) -> None:
    """Puts something that is no file in the place of one."""
    path = artifact.folder / rng.choice(artifact.files())
    kind = rng.choice(("outside", "zero", "loop", "fifo", "folder", "null", "parent", "hard"))
    twin = path.with_name("twin")
    shutil.copy(path, twin)
    path.unlink()
    targets = {"outside": "/etc/hostname", "zero": "/dev/zero", "loop": path, "null": "/dev/null"}
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hard":  # another name for the same bytes is no attack
        os.link(twin, path)
    else:  # the file itself, through a link to its folder
        twin.rename(path)
        moved = path.parent.with_name("moved" + path.parent.name)
        path.parent.rename(moved)
        path.parent.symlink_to(moved, target_is_directory=True)


def add_file(artifact: Artifact, rng: random.Random) -> None:
    name = rng.choice(("x", ".gitignore", "manifest.json.bak", "constants2", "0"))
    (artifact.folder / name).write_bytes(rng.randbytes(rng.randrange(100)))


def bomb_file(artifact: Artifact, rng: random.Random) -> None:
    """Puts few bytes that decompress to many in the place of a payload."""
    artifact.write(rng.choice(artifact.payloads()), _bomb(rng)[0])


def _bomb(rng: random.Random) -> tuple[bytes, int]:
    nbytes = rng.choice((1 << 20, 1 << 28, (1 << 30) - 1))
    return _zeros(nbytes), nbytes


@functools.cache
def _zeros(nbytes: int) -> bytes:
    """Returns so many zeros, compressed."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=nbytes)
    parts, left = [], nbytes
    while left:
        n = min(left, 1 << 24)
        parts.append(compressor.compress(bytes(n)))
        left -= n
    parts.append(compressor.flush())
    return b"".join(parts)


# -- the manifest ----------------------------------------------------------------------------------------------------


def write_manifest(artifact: Artifact, text: bytes, version: Any = (1, 0)) -> None:
    """Writes a manifest around the bytes of a body, with the digest that they have."""
    digest = hashlib.sha256(text).hexdigest()
    head = json.dumps({"format": "orbax-aot", "version": version, "sha256": digest})
    artifact.write("manifest.json", head[:-1].encode() + b',"body":' + text + b"}")


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Returns every (container, key) of a document."""
    found = [] if found is None else found
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        found.append((value, key))
        _places(value[key], found)
    return found


_ODD = (
    None, True, False, -1, 0, 1, 2, 7, 8, 64, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), 1 << 64, 10**30,
    0.5, 1e308, "", "x", "float32", "int8", "key<fry>", "token", "ref", "../../x", "/etc/hostname", "\x00", "é",
    "a" * 5000, [], {}, [0], [[0]], {"x": 1}, [None], "device", "pinned_host", "Explicit", "Manual",
)  # fmt: skip


def _edit_once(body: Any, rng: random.Random) -> None:
    places = _places(body)
    container, key = rng.choice(places)
    value = container[key]
    kind = rng.choice(
        ("odd", "near", "near", "near", "delete", "other", "other", "list", "unknown")
    )
    if kind == "odd":
        container[key] = copy.deepcopy(rng.choice(_ODD))
    elif kind == "near":
        container[key] = _near(value, rng)
    elif kind == "delete":
        del container[key]
    elif (
        kind == "other"
    ):  # what stands elsewhere under the same name, or at least has the same type
        like = [c[k] for c, k in places if k == key and c is not container]
        like = like or [c[k] for c, k in places if type(c[k]) is type(value)]
        container[key] = copy.deepcopy(rng.choice(like)) if like else None
    elif kind == "list":
        lists = [c[k] for c, k in places if isinstance(c[k], list) and c[k]]
        chosen = rng.choice(lists)
        rng.choice((chosen.reverse, lambda: chosen.append(chosen[0]), chosen.pop, chosen.clear))()
    else:
        target = rng.choice([c for c, _ in places if isinstance(c, dict)] or [body])
        target[f"new{rng.randrange(9)}"] = copy.deepcopy(rng.choice(_ODD))


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 2, -value, value, 1 << 20))
    if isinstance(value, float):
        return -value
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(("", "0", "f", "/", ".")) + value[at + 1 :]
    if isinstance(value, list):
        return rng.sample(value, len(value)) if rng.random() < 0.5 else value[1:]
    if isinstance(value, dict):
        return dict(list(value.items())[1:])
    return rng.choice((0, 1, "", []))


def edit_fields(artifact: Artifact, rng: random.Random) -> None:
    """Edits one to three fields and repairs the digest."""
    body = artifact.body()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _edit_once(body, rng)
    write_manifest(artifact, _compact(body))


def edit_variant(artifact: Artifact, rng: random.Random) -> None:
    """Edits what is said of an executable: that is what native code is told."""
    body = artifact.body()
    signatures = [s for f in body["functions"].values() for s in f["signatures"]]
    signature = rng.choice(signatures)
    part = rng.choice(
        (signature["variants"][0], signature, body["shardings"], body["meshes"], body["layouts"])
    )
    if part:
        for _ in range(rng.choice((1, 1, 2))):
            _edit_once(part, rng)
    write_manifest(artifact, _compact(body))


def exchange_signatures(artifact: Artifact, rng: random.Random) -> None:
    """Says of one function what is true of another."""
    body = artifact.body()
    one, two = rng.sample(sorted(body["functions"]), 2)
    a, b = body["functions"][one]["signatures"][0], body["functions"][two]["signatures"][0]
    what = rng.choice(("all", "inputs", "outputs", "variants", "fields"))
    if what == "all":
        body["functions"][one], body["functions"][two] = (
            body["functions"][two],
            body["functions"][one],
        )
    elif what == "fields":
        for key in rng.sample(sorted(a["variants"][0]), 3):
            if key in b["variants"][0]:
                a["variants"][0][key] = b["variants"][0][key]
    else:
        a[what], b[what] = b[what], a[what]
    write_manifest(artifact, _compact(body))


def edit_text(artifact: Artifact, rng: random.Random) -> None:
    """Damages the text of the body and repairs the digest, so that strange JSON arrives at the reader."""
    text = _compact(artifact.body())
    kind = rng.choice(("damage", "damage", "twice", "nan", "deep", "huge", "surrogate", "many"))
    at = rng.choice([i for i, c in enumerate(text) if c == ord(":")]) + 1
    inserts = {
        "nan": b"NaN,\"x\":", "deep": b"[" * 100_000 + b"]" * 100_000 + b",\"x\":", "huge": b"9" * 5000 + b",\"x\":",
        "surrogate": b"\"\\ud800\",\"x\":", "many": b"[" + b"[]," * 300_000 + b"[]],\"x\":",
    }  # fmt: skip
    if kind == "damage":
        text = _damage(text, rng)
    elif kind == "twice":
        name = rng.choice((b'"functions":{},', b'"meshes":[],', b'"state":{},', b'"kind":"state",'))
        text = b"{" + name + text[1:]
    else:
        text = text[:at] + inserts[kind] + text[at:]
    write_manifest(artifact, text)


def change_version(artifact: Artifact, rng: random.Random) -> None:
    text = _compact(artifact.body())
    write_manifest(
        artifact,
        text,
        rng.choice(([2, 0], [1, 9], [0, 1], [1], [1, 0, 0], "1.0", [1.0, 0], [-1, 0], [10**30, 0])),
    )


def splice_manifest(artifact: Artifact, rng: random.Random) -> None:
    """Takes over parts of the other step's manifest."""
    body = artifact.body()
    other = json.loads((artifact.other / "manifest.json").read_bytes())["body"]
    for key in rng.sample(sorted(other), rng.randrange(1, 4)):
        body[key] = other[key]
    write_manifest(artifact, _compact(body))


# -- payloads --------------------------------------------------------------------------------------------------------


def _entries(body: Any) -> list[tuple[str, Any]]:
    """Returns the name and the manifest's entry of each payload."""
    found = []
    for function in body["functions"].values():
        for signature in function["signatures"]:
            prefix = f"{function['folder']}/{signature['folder']}"
            for variant in signature["variants"]:
                found.append((f"{prefix}/{variant['file']}", variant))
                found += [(c["file"], c) for c in variant.get("constants", ())]
            if signature.get("portable"):
                found.append((f"{prefix}/{signature['portable']['file']}", signature["portable"]))
    return found


def _replace_payload(
    artifact: Artifact,
    name: str,
    raw: bytes,
    stored: bytes | None = None,
    raw_nbytes: int | None = None,
) -> None:
    stored = zstandard.ZstdCompressor(level=1).compress(raw) if stored is None else stored
    body = artifact.body()
    for found, entry in _entries(body):
        if found == name:
            entry.update(
                sha256=hashlib.sha256(stored).hexdigest(),
                raw_sha256=hashlib.sha256(raw).hexdigest(),
                nbytes=len(stored),
                raw_nbytes=len(raw) if raw_nbytes is None else raw_nbytes,
            )
    artifact.write(name, stored)
    write_manifest(artifact, _compact(body))


def damage_payload(artifact: Artifact, rng: random.Random) -> None:
    """Damages the raw bytes of a payload and repairs all digests."""
    name, _ = rng.choice(_entries(artifact.body()))
    raw = zstandard.ZstdDecompressor().decompress(artifact.read(name))
    _replace_payload(artifact, name, _damage(raw, rng))


def exchange_payloads(artifact: Artifact, rng: random.Random) -> None:
    """Puts the payload of one function in the place of another's and repairs all digests."""
    (one, _), (two, _) = rng.sample(_entries(artifact.body()), 2)
    raw = zstandard.ZstdDecompressor().decompress(artifact.read(two))
    _replace_payload(artifact, one, raw)


def bomb_payload(artifact: Artifact, rng: random.Random) -> None:
    """Declares a bomb as it is."""
    name, _ = rng.choice(_entries(artifact.body()))
    stored, nbytes = _bomb(rng)
    _replace_payload(artifact, name, b"", stored, nbytes)


def replace_folder(artifact: Artifact, rng: random.Random) -> None:
    """Puts the whole `_aot` folder of another step here, with or without its signature."""
    shutil.rmtree(artifact.folder)
    shutil.copytree(artifact.other, artifact.folder)
    if rng.random() < 0.3:
        (artifact.folder / rng.choice(SIGNATURE_FILES)).unlink(missing_ok=True)


def damage_signature(artifact: Artifact, rng: random.Random) -> None:
    name = rng.choice(SIGNATURE_FILES)
    artifact.write(name, _damage(artifact.read(name), rng))


def drop_signature(artifact: Artifact, rng: random.Random) -> None:
    (artifact.folder / rng.choice(SIGNATURE_FILES)).unlink()


TIERS: dict[int, tuple[Mutation, ...]] = {
    1: (
        damage_file, damage_file, damage_file, damage_file, swap_files, splice_file, splice_file, splice_bytes,
        delete_file, rename_file, link_file, add_file, bomb_file,
    ),
    2: (
        edit_fields, edit_fields, edit_fields, edit_variant, edit_variant, edit_variant, exchange_signatures,
        edit_text, change_version, splice_manifest,
    ),
    3: (
        damage_payload, damage_payload, exchange_payloads, bomb_payload, replace_folder, edit_variant,
        damage_signature, drop_signature, add_file, swap_files, link_file,
    ),
}  # fmt: skip


def mutate(artifact: Artifact, tier: int, seed: int) -> str:
    """Damages `artifact`; returns the name of the mutation."""
    rng = random.Random(f"{tier}-{seed}")
    mutation = rng.choice(TIERS[tier])
    mutation(artifact, rng)
    return mutation.__name__

"""The format: what is written is read back, and what cannot be meant is refused with the place where it stands."""

from __future__ import annotations

import hashlib
import json

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from test_plan import manifest as example

from orbax_aot import manifest as m
from orbax_aot import store
from orbax_aot.errors import CorruptArtifactError

BODY = example().body


def test_the_file_is_json_with_the_digest_of_the_body_as_it_stands():
    data = m.encode(BODY)
    document = json.loads(data)
    assert (document["format"], document["version"]) == ("orbax-aot", [1, 0])
    text = data[data.index(b'"body":') + len(b'"body":') : -1]
    assert hashlib.sha256(text).hexdigest() == document["sha256"]
    assert json.loads(text) == document["body"]


def test_what_is_written_is_read_back():
    found = m.decode(m.encode(BODY))
    assert (found.body, found.version, found.is_readable) == (BODY, (1, 0), True)


@hypothesis.given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=5).filter(str.isascii)),
    st.lists(st.tuples(st.text("ab", min_size=1), st.integers(1, 4)), max_size=3),
)  # fmt: skip
def test_any_names_and_meshes_are_read_back(created_by, axes):
    mesh = m.Mesh(axes=tuple(axes), types=("Auto",) * len(axes))
    body = m.Body(created_by=created_by, meshes=(mesh,))
    assert m.decode(m.encode(body)).body == body


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.integers(0, len(m.encode(BODY)) - 1), st.integers(1, 255))
def test_any_byte_of_the_body_that_is_changed_is_refused(at, change):
    data = bytearray(m.encode(BODY))
    start = data.index(b'"body":') + len(b'"body":')
    at = start + at % (len(data) - 1 - start)
    data[at] ^= change
    with pytest.raises(CorruptArtifactError):
        m.decode(bytes(data))


@hypothesis.given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(CorruptArtifactError, match="not a manifest"):
        m.decode(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["shardings"][0].update(mesh=7), "$.body.shardings[0].mesh: index 7 of a table of 1"),
        (lambda b: b["meshes"][0].update(types=["Auto"]), "axes, types and positions disagree"),
        (lambda b: b["meshes"][0].update(axes=[["data", 0], ["model", 2]]), "are out of range"),
        (lambda b: leaf(b).update(shape=[-1]), "is out of range"),
        (lambda b: leaf(b).update(shape=[1] * 100), "is out of range"),
        (lambda b: leaf(b).update(sharding=-1), "index -1"),
        (lambda b: variant(b).update(kept=[0, 0]), ".kept: not indices of 1 inputs"),
        (lambda b: variant(b).update(kept=[5]), ".kept: not indices of 1 inputs"),
        (lambda b: variant(b).update(in_types=[]), ".in_types: 0 entries, expected 1"),
        (lambda b: variant(b).update(nbytes=1 << 60), "are out of range"),
        (lambda b: variant(b).update(raw_nbytes=-1), "are out of range"),
        (lambda b: variant(b).pop("topology"), "topology"),
        (lambda b: variant(b).update(file=3), "Expected `str`"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(change, message):
    body = json.loads(msgspec.json.encode(BODY))
    change(body)
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest()
    head = f'{{"format":"orbax-aot","version":[1,0],"sha256":"{digest}","body":'
    with pytest.raises(CorruptArtifactError) as error:
        m.decode(head.encode() + text + b"}", "the/path")
    assert message in str(error.value) and str(error.value).startswith("the/path: ")


def leaf(body):
    return body["functions"]["f"]["signatures"][0]["inputs"][0]


def variant(body):
    return body["functions"]["f"]["signatures"][0]["variants"][0]


# -- the folder -------------------------------------------------------------------------------------------------------


@hypothesis.given(st.sets(st.text(min_size=1, max_size=150), min_size=2, max_size=10))
def test_function_names_become_safe_folder_names_one_to_one(names):
    folders = {store.folder_name(name) for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder == folder.lower() and folder.isascii() and 0 < len(folder) <= 120
        assert not set(folder) & set('/\\:*?"<>| ') and not folder.startswith((".", "-"))
        assert folder != "constants"


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.binary(min_size=1, max_size=500), st.data())
def test_any_change_of_stored_bytes_is_refused_before_they_are_used(raw, data):
    stored, fields = store.pack(raw)
    file = m.File(file="x", **fields)
    assert store.unpack(stored, file, "x") == raw
    at = data.draw(st.integers(0, len(stored) - 1))
    damaged = stored[:at] + bytes([stored[at] ^ data.draw(st.integers(1, 255))]) + stored[at + 1 :]
    for other in (damaged, stored[:-1], stored + b"x", b""):
        with pytest.raises(CorruptArtifactError):
            store.unpack(other, file, "x")


def test_a_bomb_stops_at_the_declared_size():
    stored, fields = store.pack(bytes(1 << 26))
    file = m.File(file="x", **{**fields, "raw_nbytes": 1000})
    with pytest.raises(CorruptArtifactError, match="holds 67108864 bytes, expected 1000"):
        store.unpack(stored, file, "x")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", ".hidden", "a\x00b", "~", "a\\b"]
)
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    file = m.File(file=name, sha256="", raw_sha256="", nbytes=1, raw_nbytes=1, codec="zstd")
    with pytest.raises(CorruptArtifactError, match="is not the name of a file in it"):
        store.Store(tmp_path).read(name, file)


def test_a_missing_file_and_one_of_another_size_are_corrupt(tmp_path):
    file = m.File(file="x", sha256="", raw_sha256="", nbytes=3, raw_nbytes=1, codec="zstd")
    folder = store.Store(tmp_path)
    with pytest.raises(CorruptArtifactError, match=r"missing\. Save this step again\."):
        folder.read("f/x", file)
    folder.write("f/x", b"four")
    with pytest.raises(CorruptArtifactError, match="4 bytes, expected at most 3"):
        folder.read("f/x", file)

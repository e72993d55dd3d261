"""Forward compatibility: what newer versions may add, and what they may not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trust_support as support

import orbax_aot as oaot
from orbax_aot import manifest as m
from orbax_aot import plan, store, strict_json
from orbax_aot.report import ReasonCode, Verdict


def _write(item: Path, body: Any, version: Any = (1, 0)) -> None:
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = json.dumps({"format": "orbax-aot", "version": version, "sha256": digest})
    (item / "_aot/manifest.json").write_text(f'{head[:-1]},"body":{text}}}')


def _body(item: Path) -> Any:
    return json.loads((item / "_aot/manifest.json").read_bytes())["body"]


def _add_unknown(value: Any) -> None:
    if isinstance(value, dict):
        for child in list(value.values()):
            _add_unknown(child)
        if "file" in value or "folder" in value or "functions" in value:
            value["from_the_future"] = {"x": [1, None, "y"]}
    elif isinstance(value, list):
        for child in value:
            _add_unknown(child)


@pytest.mark.parametrize("version", [(1, 0), (1, 7)])
def test_unknown_fields_of_a_newer_minor_version_are_ignored(item: Path, version: Any) -> None:
    body = _body(item)
    _add_unknown(body)
    _write(item, body, version)
    assert support.restore(item).verdict == "LOADED"


def test_a_newer_major_version_is_a_reason_not_an_error(item: Path) -> None:
    _write(item, {"all": "new"}, (2, 0))
    outcome = support.restore(item)
    assert outcome.text == "FORMAT_VERSION: saved version 2.0, here version 1.0"
    assert outcome.weights


def test_a_wrong_type_is_told_with_its_json_path(item: Path) -> None:
    body = _body(item)
    body["functions"]["step"]["signatures"][0]["variants"][0]["nbytes"] = "12"
    _write(item, body)
    outcome = support.restore(item)
    assert outcome.reasons == ["CORRUPT"]
    assert (
        "Expected `int`, got `str` - at `$.body.functions[...].signatures[0].variants[0].nbytes`"
        in outcome.text
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":{"b":[1,{"c":1,"c":2}]}}', "the name is there twice - at `$.a.b[1].c`"),
        (b'{"a":[NaN]}', "NaN is no JSON - at `$.a[0]`"),
        (b'{"a":-Infinity}', "-Infinity is no JSON - at `$.a`"),
        (b'[1,1e999]', "a number out of range - at `$[1]`"),
        (b'[' + b'9' * 5000 + b']', "a number of 5000 digits - at `$[0]`"),
        (b'[' * 300 + b']' * 300, "nested 300 deep, at most 200 - at `$`"),
        (b'["\xff"]', "not UTF-8 (byte 2) - at `$`"),
    ],
)  # fmt: skip
def test_what_json_leaves_open_is_refused_with_its_path(text: bytes, message: str) -> None:
    with pytest.raises(strict_json.StrictJsonError) as raised:
        strict_json.require(text)
    assert str(raised.value) == message


def test_brackets_in_strings_do_not_nest() -> None:
    strict_json.require(b'{"a":"' + b"[" * 1000 + b'\\"{{"}')


def test_a_manifest_that_could_not_be_read_again_is_not_written() -> None:
    tree: Any = "leaf"
    for _ in range(300):
        tree = [tree]
    signature = m.Signature(
        folder="0", inputs=(), outputs=(), output_tree=tree, code=None, program=None, portable=None
    )
    function = m.Function(folder="f", signatures=(signature,))
    with pytest.raises(ValueError, match="nested"):
        m.encode(m.Body(functions={"f": function}))


def test_what_compresses_too_well_is_stored_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_FREE_NBYTES", 1000)
    raw = bytes(1 << 20)
    stored, fields = store.pack(raw)
    assert fields["codec"] == "raw"
    file = m.File(file="x", **fields)
    assert store.unpack(stored, file, "x") == raw
    bomb = store.zstandard.ZstdCompressor().compress(raw)
    entry = msgspec.structs.replace(file, codec="zstd", nbytes=len(bomb), sha256=store.digest(bomb))
    with pytest.raises(oaot.CorruptArtifactError, match="would become 1048576; at most 256 times"):
        store.unpack(bomb, entry, "x")


@pytest.mark.parametrize(
    ("native", "portable", "live", "verdict"),
    [
        ("", "", False, Verdict.LOADED),
        ("distrust", "", False, Verdict.REBUILT),
        ("distrust", "distrust", False, Verdict.REFUSED),
        ("distrust", "distrust", True, Verdict.RECOMPILED),
    ],
)
def test_the_plan_turns_distrust_into_verdict_and_reason(
    item: Path, native: str, portable: str, live: bool, verdict: Verdict
) -> None:
    from orbax_aot import topology

    manifest = store.Store(item).read_manifest()
    wanted = {"step": plan.Wanted(live=live)} if live else None
    request = plan.Request(functions=wanted, untrusted=native, portable_untrusted=portable)
    decided = plan.decide(manifest, topology.describe_machine(None), request)["step"]
    assert decided.verdict is verdict
    reasons = [r.code for d in decided.decisions for r in d.reasons]
    assert reasons == ([ReasonCode.UNTRUSTED] if native else [])

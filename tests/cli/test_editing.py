"""`diff`, `prune` and `attach`: committed steps compared and changed, with readers looking on."""

from __future__ import annotations

import hashlib
import json
import pathlib
import threading

import cli_checkpoint as saved
import cli_support as support
import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_aot as oaot
from orbax_aot import editing, locations
from orbax_aot import manifest as m
from orbax_aot import store as store_lib
from orbax_aot.report import ReasonCode, Verdict


def weights(root: pathlib.Path) -> dict[str, str]:
    """Returns the digest of each file that is not of this package."""
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in root.rglob("*")
        if p.is_file() and "_aot" not in p.parts
    }


def restore(root: pathlib.Path, **args) -> oaot.Restored:
    with ocp.CheckpointManager(root, item_handlers=oaot.AotHandler()) as manager:
        return manager.restore(manager.latest_step(), args=oaot.AotRestore(**args))


def alter(item: pathlib.Path, change) -> None:
    """Rewrites a manifest with `change` made to its plain form."""
    manifest = oaot.inspect(item)
    plain = msgspec.to_builtins(manifest.body)
    change(plain)
    store_lib.Store(item).write_manifest(msgspec.convert(plain, m.Body))


# -- diff ------------------------------------------------------------------------------------------------------------


def test_steps_with_the_same_functions_do_not_differ(saved_root):
    assert oaot.diff(saved_root / "1", saved_root / "2") == ()
    result = support.run("diff", str(saved_root / "1"), str(saved_root / "2"))
    assert (result.exit_code, result.output) == (0, "no difference\n")


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("code", "fingerprint"), "f" * 64, ["code"]),
        (("code", "undecidable"), ["reads a clock"], ["code"]),
        (("program",), "sha256:" + "e" * 64, ["program"]),
        (("context",), {"jax_enable_x64": True}, ["context"]),
        (("portable",), None, ["portable"]),
        (("inputs", 0, "dtype"), "float16", ["inputs"]),
        (("inputs", 0, "donated"), True, ["inputs"]),
        (("variants", 0, "environment", "jaxlib"), "9.9", ["versions"]),
        (("variants", 0, "environment", "xla_flags"), {"xla_x": "1"}, ["flags"]),
        (("variants", 0, "environment", "options"), {"o": "1"}, ["options"]),
        (("variants", 0, "environment", "cpu_features"), "avx", ["cpu"]),
        (("variants", 0, "environment", "config", "jax_x"), 1, ["config"]),
        (("variants", 0, "topology", "device_kind"), "TPU v4", ["topology"]),
        (("variants", 0, "hlo_fingerprint"), "x", ["executable"]),
        (("variants",), [], ["variant"]),
    ],
    ids=lambda x: "/".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_each_kind_of_difference_is_found_and_only_it(root, keys, value, expected):
    def change(plain):
        place = plain["functions"]["double"]["signatures"][0]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    alter(root / "2/default", change)
    there = oaot.diff(root / "1", root / "2")
    back = oaot.diff(root / "2", root / "1")
    assert [d.what for d in there] == expected
    assert [d.what for d in back] == expected
    if expected != ["cpu"]:  # which says "only there" and "only here"
        assert [(d.b, d.a) for d in there] == [(d.a, d.b) for d in back]
    assert there[0].where.startswith("double/0")
    assert support.run("diff", str(root / "1"), str(root / "2")).exit_code == 3


def test_functions_that_only_one_step_has_are_told(root):
    alter(root / "2/default", lambda plain: plain["functions"].pop("double"))
    assert list(map(str, oaot.diff(root / "1", root / "2"))) == [
        "double: function: 1 signature | -"
    ]
    result = support.run("diff", str(root / "1"), str(root / "2"), "--json")
    assert json.loads(result.output) == [
        {"where": "double", "what": "function", "a": "1 signature", "b": ""}
    ]


def test_changed_code_and_another_mesh_are_told_on_a_screen(root, monkeypatch):
    fns = {"double": oaot.jit(lambda x: x * 3), "train_step": oaot.jit(saved.train_step)}
    fns["double"].compile(np.ones(3, np.float32))
    fns["train_step"].compile(*saved.arguments(saved.make_mesh((2, 2))))
    oaot.attach(root / "2", fns)
    differences = oaot.diff(root / "1", root / "2")
    kinds = {(d.where.partition("/")[0], d.what) for d in differences}
    assert {("double", "code"), ("double", "program"), ("train_step", "topology")} <= kinds
    topology = next(d for d in differences if d.what == "topology")
    assert (topology.a, topology.b) == ("count 8", "count 4")
    monkeypatch.chdir(root)
    text = support.run("diff", "1", "2").output
    assert text.startswith("a  1\nb  2\n\ndouble/0\n  code         a ")


# -- prune -----------------------------------------------------------------------------------------------------------


def test_pruning_changes_nothing_unless_told_to(root):
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    result = support.run("prune", str(root), "--platform", "cpu", "--portable")
    assert result.exit_code == 0
    assert "would drop 5 parts:" in result.output
    assert "Nothing was changed; add --yes to do it." in result.output
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


def test_dropping_executables_leaves_what_can_be_rebuilt(root):
    kept = weights(root)
    pruned = oaot.prune(root, functions=["train_step"], platforms=["cpu"], dry_run=False)
    assert pruned.parts == ("train_step/0/0 (cpu x 8)",)
    (file,) = pruned.files
    assert file == "train_step/0/0.pjrt.zst" and not (root / "2/default/_aot" / file).exists()
    assert weights(root) == kept
    report = restore(root).fns.report
    assert report["train_step"].verdict is Verdict.REBUILT
    assert report["double"].verdict is Verdict.LOADED
    assert oaot.inspect(root / "1").functions["train_step"].signatures[0].variants


def test_dropping_the_stablehlo_leaves_the_executables(root):
    result = support.run("prune", str(root), "--portable", "--yes", "--json")
    told = json.loads(result.output)
    assert sorted(told["parts"]) == ["double/0 StableHLO", "train_step/0 StableHLO"]
    assert not list((root / "2").rglob("*.stablehlo.zst"))
    assert restore(root).fns.report["train_step"].verdict is Verdict.LOADED
    assert oaot.check(root, devices=4)["train_step"].verdict is Verdict.REFUSED


def test_one_variant_can_be_named(root):
    result = support.run("prune", str(root), "--variant", "double/0/0", "--yes")
    assert result.exit_code == 0
    assert not oaot.inspect(root).functions["double"].signatures[0].variants
    assert oaot.inspect(root).functions["train_step"].signatures[0].variants
    result = support.run("prune", str(root), "--variant", "double/0/7", "--yes")
    assert result.exit_code == 2
    assert "no variant 'double/0/7' there" in result.output


def test_files_that_nothing_refers_to_go_once_no_writer_can_still_mean_them(root, monkeypatch):
    orphan = root / "2/default/_aot/double/0/left.pjrt.zst"
    orphan.write_bytes(b"left by a writer that was killed")
    assert oaot.prune(root, dry_run=False).files == {}
    monkeypatch.setattr(editing, "_ORPHAN_AGE_SECS", -1.0)
    assert oaot.prune(root, dry_run=False).files == {"double/0/left.pjrt.zst": 32}
    assert not orphan.exists()
    assert restore(root).fns.report["double"].verdict is Verdict.LOADED


# -- attach ----------------------------------------------------------------------------------------------------------


def save_plainly(root: pathlib.Path) -> pathlib.Path:
    state, _ = saved.arguments(saved.make_mesh())
    with ocp.CheckpointManager(root) as manager:
        manager.save(7, args=ocp.args.StandardSave(state))
    return root


def test_functions_are_added_to_a_step_that_plain_orbax_saved(tmp_path):
    root = save_plainly(tmp_path / "plain")
    kept = weights(root)
    manifest = oaot.attach(root, saved.functions())
    assert sorted(manifest.functions) == ["calls_back", "double", "train_step"]
    assert weights(root) == kept
    state, fns = restore(root)
    assert fns.report["train_step"].verdict is Verdict.LOADED
    expected_state, batch = saved.arguments(saved.make_mesh())
    expected = jax.jit(saved.train_step)(expected_state, batch)
    jax.tree.map(np.testing.assert_array_equal, fns.train_step(state, batch), expected)
    with ocp.CheckpointManager(root) as manager:  # without this package, as ever
        plain = manager.restore(7, args=ocp.args.StandardRestore(expected_state))
    jax.tree.map(np.testing.assert_array_equal, plain, expected_state)


def test_functions_are_added_to_those_that_are_there_and_replace_their_own_name(root):
    kept = weights(root)
    before = oaot.inspect(root)
    triple = oaot.jit(lambda x: x * 3)
    triple.compile(np.ones(3, np.float32))
    oaot.attach(root, {"double": triple, "new": triple})
    assert weights(root) == kept
    fns = restore(root).fns
    assert {n: r.verdict.name for n, r in fns.report.items() if n != "calls_back"} == dict.fromkeys(
        ("double", "new", "train_step"), "LOADED"
    )
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(fns.double(x), x * 3)
    after = oaot.inspect(root)
    assert after.functions["train_step"].signatures[0].program == (
        before.functions["train_step"].signatures[0].program
    )
    assert after.body.created_by == before.body.created_by
    # The files of the old double are still there for who has read the old manifest; prune takes them.
    gone = {*m.files_of(before.body)} - {*m.files_of(after.body)}
    assert gone and all((root / "2/default/_aot" / f).exists() for f in gone)
    assert oaot.prune(root).files == {}
    assert support.run("prune", str(root), "--unused", "--yes").exit_code == 0
    assert not any((root / "2/default/_aot" / f).exists() for f in gone)
    assert restore(root).fns.report["double"].verdict is Verdict.LOADED


def test_a_function_that_was_never_called_is_refused_and_nothing_changes(root):
    before = (root / "2/default/_aot/manifest.json").read_bytes()
    with pytest.raises(oaot.AotError) as caught:
        oaot.attach(root, {"never": oaot.jit(saved.double)})
    assert str(caught.value) == (
        "never: never called or compiled, so there is nothing to attach; call its .compile(…) first."
    )
    assert (root / "2/default/_aot/manifest.json").read_bytes() == before


def test_of_two_writers_the_second_is_told(root):
    edit = editing.Edit(locations.find_item(root))
    oaot.prune(root, portable=True, dry_run=False)
    edit.functions.pop("double")
    with pytest.raises(oaot.StepChangedError, match="changed by someone else meanwhile"):
        edit.commit()
    assert "double" in oaot.inspect(root).functions


def test_a_signature_of_the_old_manifest_goes_with_it(root, caplog):
    signature = root / "2/default/_aot/manifest.sig"
    signature.write_text("signed")
    oaot.prune(root, portable=True)
    assert signature.exists()
    oaot.prune(root, portable=True, dry_run=False)
    assert not signature.exists()
    assert "removed, since the step is not what was signed any more; sign it again." in caplog.text


def test_a_step_of_a_newer_minor_format_is_not_rewritten(root):
    path = root / "2/default/_aot/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version":[1,0]', b'"version":[1,1]', 1))
    assert oaot.inspect(root).version == (1, 1)
    with pytest.raises(oaot.AotError, match=r"format 1\.1 by a newer orbax-aot"):
        oaot.prune(root, portable=True, dry_run=False)


def test_a_reader_sees_the_old_or_the_new_step_whole_while_it_is_changed(root):
    fns = {}
    for factor in (2, 3):
        fns[factor] = oaot.compile(
            jax.jit(lambda x, factor=factor: x * factor), np.ones(3, np.float32)
        )
    stop, problems, seen = threading.Event(), [], set()

    def read() -> None:
        while not stop.is_set():
            try:
                store = store_lib.Store(root / "2/default")
                body = store.read_manifest().body
                for name, file in m.files_of(body).items():
                    assert store_lib.digest(store.read(name, file)) == file.sha256, name
                seen.add(body.functions["double"].signatures[0].program)
            except Exception as e:
                problems.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(30):
            oaot.attach(root, {"double": fns[2 + i % 2]}, portable=False)
    finally:
        stop.set()
        reader.join()
    assert problems == []
    assert len(seen) >= 2
    assert restore(root).fns.report["double"].reasons == ()
    assert ReasonCode.CORRUPT not in {r.code for r in oaot.check(root)["double"].reasons}

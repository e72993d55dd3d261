"""Whose code is loaded: owners, modes, policies and the environment variable."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import trust_support as support

import orbax_aot as oaot
from orbax_aot import files, owners, store

_PAYLOAD = "_aot/step/0/0.pjrt.zst"


def _is_root() -> bool:
    return os.geteuid() == 0


def test_own_files_are_loaded(item: Path) -> None:
    outcome = support.restore(item)
    assert (outcome.verdict, outcome.reasons) == ("LOADED", [])
    assert np.array_equal(outcome.call(), support.EXPECTED)


@pytest.mark.parametrize("name", ["_aot/manifest.json", "_aot", _PAYLOAD])
def test_native_code_that_others_can_write_is_not_loaded(item: Path, name: str) -> None:
    (item / name).chmod(0o777)
    outcome = support.restore(item)
    assert outcome.reasons == ["UNTRUSTED"]
    assert outcome.text == (
        f"UNTRUSTED: {item / name} can be written by others (mode 0777). Run chmod go-w on it"
    )
    assert outcome.loads == 0
    assert outcome.weights


def test_untrusted_code_is_replaced_by_its_stablehlo(item: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    outcome = support.restore(item)
    assert (outcome.verdict, outcome.reasons) == ("REBUILT", ["UNTRUSTED"])
    assert np.array_equal(outcome.call(), support.EXPECTED)


def test_untrusted_code_is_replaced_by_the_live_function(item: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    outcome = support.restore(item, fn=support.live())
    assert (outcome.verdict, outcome.reasons) == ("RECOMPILED", ["UNTRUSTED"])
    assert np.array_equal(outcome.call(), support.EXPECTED)
    assert outcome.loads == 0


def test_untrusted_stablehlo_is_refused_where_the_policy_says_so(item: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    outcome = support.restore(item, oaot.Trust.owner(portable=False))
    assert (outcome.verdict, outcome.reasons) == ("REFUSED", ["UNTRUSTED"])
    assert outcome.weights


@pytest.mark.skipif(not _is_root(), reason="only root can give files away")
def test_files_of_another_owner_are_not_loaded_unless_he_is_named(item: Path) -> None:
    for path in (item / "_aot", *(item / "_aot").rglob("*")):
        os.chown(path, 12345, 12345)
    outcome = support.restore(item)
    assert outcome.reasons == ["UNTRUSTED"]
    assert "belongs to user 12345, neither to us" in outcome.text
    assert support.restore(item, oaot.Trust.owner(12345)).verdict == "LOADED"


@pytest.mark.skipif(not _is_root(), reason="only root can give files away")
def test_a_payload_of_another_owner_under_a_manifest_of_ours_is_not_loaded(item: Path) -> None:
    os.chown(item / _PAYLOAD, 12345, 12345)
    outcome = support.restore(item)
    assert outcome.reasons == ["UNTRUSTED"]
    assert outcome.loads == 0


def _status(uid: int, gid: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("uid", "mode", "expected"),
    [
        (1000, 0o644, ""),
        (0, 0o644, ""),
        (1000, 0o640, ""),
        (1000, 0o646, "can be written by others (mode 0646)"),
        (1000, 0o664, "can be written by its group (mode 0664)"),
        (1000, 0o666, "can be written by others (mode 0666)"),
        (1001, 0o600, "belongs to user 1001"),
        (65534, 0o600, "belongs to"),
        (7, 0o600, ""),
    ],
)
def test_owner_policy_judges_owner_and_mode(
    monkeypatch: pytest.MonkeyPatch, uid: int, mode: int, expected: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = owners.find_distrust(_status(uid, 5, mode), "/file", frozenset({7}))
    assert (expected in found) if expected else found == ""


@pytest.mark.parametrize(
    ("group", "members", "access_list", "private"),
    [
        ("ann", [], False, True),
        ("ann", ["ann"], False, True),
        ("ann", ["bob"], False, False),
        ("staff", [], False, False),
        ("ann", [], True, False),
    ],
)
def test_a_group_may_write_only_where_it_is_the_owners_own(
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    members: list[str],
    access_list: bool,
    private: bool,
) -> None:
    import grp
    import pwd

    user = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/", "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((group, "x", 1000, members)))
    listed = ["system.posix_acl_access"] if access_list else []
    monkeypatch.setattr(os, "listxattr", lambda *_, **__: listed)
    found = owners.find_distrust(_status(1000, 1000, 0o664), "/file", frozenset())
    assert (found == "") is private


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_we_save_we_trust_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        support.save(tmp_path / "item", oaot.AotHandler())
    finally:
        os.umask(before)
    assert support.restore(tmp_path / "item").verdict == "LOADED"


def test_file_systems_without_owners_are_left_to_their_permissions(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    place = store.Store(item)
    manifest, content = place.open_manifest()
    assert oaot.Trust.owner().judge(place, manifest, content).native
    monkeypatch.setattr(files, "folder_status", lambda _: None)
    content = dataclasses.replace(content, status=None)
    assert not oaot.Trust.owner().judge(place, manifest, content).native


def test_the_default_check_is_one_look_at_the_folder(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store.Store(item)
    manifest, content = place.open_manifest()
    calls: list[str] = []
    for name in ("stat", "lstat", "open", "listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, _r=real, _n=name, **k: (calls.append(_n), _r(*a, **k))[1]
        )
    start = time.perf_counter()
    assert not oaot.Trust.owner().judge(place, manifest, content).native
    assert time.perf_counter() - start < 0.01
    assert calls == ["lstat"]


def test_anyone_loads_what_others_wrote(item: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    assert support.restore(item, oaot.Trust.anyone()).verdict == "LOADED"


def test_anyone_does_not_load_what_is_damaged(item: Path) -> None:
    data = bytearray((item / _PAYLOAD).read_bytes())
    data[100] ^= 1
    (item / _PAYLOAD).write_bytes(data)
    outcome = support.restore(item, oaot.Trust.anyone())
    assert outcome.reasons == ["CORRUPT"]
    assert outcome.loads == 0


def test_portable_only_compiles_stablehlo_and_loads_nothing(item: Path) -> None:
    outcome = support.restore(item, oaot.Trust.portable_only())
    assert (outcome.verdict, outcome.loads) == ("REBUILT", 0)
    assert outcome.text == "UNTRUSTED: the policy is Trust.portable_only()"
    assert np.array_equal(outcome.call(), support.EXPECTED)


def test_never_uses_nothing_that_was_saved(item: Path) -> None:
    outcome = support.restore(item, oaot.Trust.never())
    assert (outcome.verdict, outcome.reasons) == ("REFUSED", ["UNTRUSTED"])
    assert outcome.weights
    outcome = support.restore(item, oaot.Trust.never(), support.live())
    assert np.array_equal(outcome.call(), support.EXPECTED)
    assert outcome.loads == 0


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        ("anyone", "LOADED"),
        ("owner", "REBUILT"),
        ("portable_only", "REBUILT"),
        ("never", "REFUSED"),
        ("nevr", "REFUSED"),
        ("signed:/no/such/key", "REFUSED"),
    ],
)
def test_the_environment_variable_replaces_the_policy(
    item: Path, monkeypatch: pytest.MonkeyPatch, value: str, verdict: str
) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    monkeypatch.setenv("ORBAX_AOT_TRUST", value)
    outcome = support.restore(item, oaot.Trust.owner())
    assert outcome.verdict == verdict
    assert outcome.weights


def test_a_misspelt_environment_variable_is_named_in_the_reason(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORBAX_AOT_TRUST", "everyone")
    assert "ORBAX_AOT_TRUST=everyone: is none of owner, anyone" in support.restore(item).text


def test_an_owner_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"Trust\.owner\('no_such_user'\): no such user here\."):
        oaot.Trust.owner("no_such_user")


def test_what_was_not_trusted_is_not_saved_again_as_ours(item: Path, tmp_path: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    outcome = support.restore(item)
    assert outcome.verdict == "REBUILT"
    outcome.call()
    again = tmp_path / "again"
    again.mkdir()
    handler = oaot.AotHandler()
    handler.save(again, oaot.AotSave({"w": support.WEIGHTS}, fns={"step": outcome.fns["step"]}))
    handler.finalize(again)
    assert not store.Store(again).read_manifest().functions["step"].signatures


def test_on_mismatch_raise_names_the_distrust_before_the_state_is_touched(item: Path) -> None:
    (item / "_aot/manifest.json").chmod(0o666)
    with pytest.raises(oaot.IncompatibleExecutableError, match="UNTRUSTED"):
        oaot.AotHandler().restore(item, oaot.AotRestore(on_mismatch="raise"))


def _custom_call_program(target: str) -> Any:
    @dataclasses.dataclass
    class Program:
        outside_calls = (target,)
        in_avals = out_avals = ()

    return Program()


def test_untrusted_stablehlo_that_calls_outside_is_not_compiled(
    item: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orbax_aot import portable, restored

    (item / "_aot/manifest.json").chmod(0o666)
    monkeypatch.setattr(
        portable.PortableProgram, "outside_calls", property(lambda _: ("my_own_kernel",))
    )
    compiled: list[Any] = []
    monkeypatch.setattr(portable.PortableProgram, "compile", lambda *a, **k: compiled.append(a))
    outcome = support.restore(item)
    assert outcome.verdict == "REFUSED"
    assert outcome.text.endswith(
        "UNTRUSTED: the StableHLO calls my_own_kernel, and comes from no trusted source"
    )
    assert not compiled
    assert restored  # the module under test


def test_verify_checks_every_byte(make_item: Callable[[str], Path]) -> None:
    whole = make_item("whole")
    assert "step" in oaot.verify(whole).functions
    for path in sorted(p for p in (whole / "_aot").rglob("*") if p.is_file()):
        name = path.relative_to(whole)
        damaged = make_item("damaged")
        data = bytearray((damaged / name).read_bytes())
        data[len(data) // 2] ^= 1
        (damaged / name).write_bytes(data)
        with pytest.raises(oaot.CorruptArtifactError):
            oaot.verify(damaged)
        import shutil

        shutil.rmtree(damaged)


def test_verify_lists_all_that_is_wrong(item: Path) -> None:
    (item / _PAYLOAD).unlink()
    (item / "_aot/stray").write_bytes(b"")
    with pytest.raises(oaot.CorruptArtifactError) as raised:
        oaot.verify(item)
    aot = item / "_aot"
    assert str(raised.value) == (
        f"{aot}: not as it was saved:\n"
        f"  {aot}/step/0/0.pjrt.zst: missing. Save this step again.\n"
        f"  {aot}/stray: not a file of this manifest."
    )


def test_verify_takes_a_checkpoint_directory_a_step_or_an_item(tmp_path: Path) -> None:
    step = support.live()
    step(support.WEIGHTS, 1.0)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler()) as manager:
        for number in (1, 10):
            manager.save(number, args=oaot.AotSave({"w": support.WEIGHTS}, fns={"step": step}))
            manager.wait_until_finished()
    for path in (tmp_path, tmp_path / "10", tmp_path / "10/default"):
        assert oaot.verify(path).path == str(tmp_path / "10/default/_aot/manifest.json")
    with pytest.raises(oaot.NoExecutablesError):
        oaot.verify(tmp_path / "nothing")


def test_only_plain_lower_case_names_are_written() -> None:
    for name in ("../x", "/x", "a//b", "A", "é", "a" * 200, "", ".", "a/b/c/d/e", ".hidden"):
        with pytest.raises(oaot.CorruptArtifactError):
            files.require_name(files.epath.Path("/folder"), name)

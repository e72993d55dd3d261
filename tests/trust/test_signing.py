"""Signatures by real keys and the real library."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("model_signing", reason="the extra `signing` is not installed")
pytest.importorskip("OpenSSL", reason="the extra `signing` is not installed")

import numpy as np
import orbax.checkpoint as ocp
import signing_support
import trust_support as support

import orbax_aot as oaot
from orbax_aot import signing


@dataclasses.dataclass
class Signed:
    """Two steps that were signed at save, by one signer."""

    one: Path
    two: Path
    private: Path
    public: Path

    @property
    def trust(self) -> oaot.Trust:
        return oaot.Trust.signed(self.public)


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("signed")
    private, public = signing_support.make_key(folder, "ours")
    handler = oaot.AotHandler(trust=oaot.Trust.signed(public, private_key=private))
    for name, shift in (("one", 0.0), ("two", 1.0)):
        support.save(folder / name, handler, shift)
    return Signed(folder / "one", folder / "two", private, public)


@pytest.fixture
def copy(signed: Signed, tmp_path: Path) -> Path:
    """A copy of the first step, to be changed."""
    return Path(shutil.copytree(signed.one, tmp_path / "one"))


def _require_untrusted(item: Path, trust: oaot.Trust, why: str = "") -> None:
    outcome = support.restore(item, trust)
    assert {*outcome.reasons} <= {"UNTRUSTED", "CORRUPT"}, outcome.text
    assert outcome.verdict == "REFUSED"
    assert why in outcome.text
    assert outcome.loads == 0
    assert outcome.weights
    outcome = support.restore(item, trust, support.live())
    assert np.array_equal(outcome.call(), support.EXPECTED)
    assert outcome.loads == 0


def test_a_step_that_was_signed_at_save_is_loaded(signed: Signed) -> None:
    assert sorted(p.name for p in (signed.one / "_aot").iterdir()) == [
        "item.json", "manifest.json", "manifest.sig", "step",
    ]  # fmt: skip
    outcome = support.restore(signed.one, signed.trust)
    assert (outcome.verdict, outcome.reasons, outcome.loads) == ("LOADED", [], 1)
    oaot.verify(signed.one, trust=signed.trust)


def test_signing_at_save_goes_through_a_manager(tmp_path: Path, signed: Signed) -> None:
    trust = oaot.Trust.signed(signed.public, private_key=signed.private)
    step = support.live()
    step(support.WEIGHTS, 1.0)
    with ocp.CheckpointManager(tmp_path, item_handlers=oaot.AotHandler(trust=trust)) as manager:
        manager.save(1, args=oaot.AotSave({"w": support.WEIGHTS}, fns={"step": step}))
        manager.wait_until_finished()
        restored = manager.restore(1, args=oaot.AotRestore())
        assert restored.fns.report["step"].verdict is oaot.Verdict.LOADED
    with ocp.CheckpointManager(tmp_path) as manager:  # the state stays readable by plain Orbax
        assert np.array_equal(manager.restore(1)["w"], support.WEIGHTS)


def test_tampering_with_any_file_is_caught(signed: Signed, tmp_path: Path) -> None:
    names = sorted(
        p.relative_to(signed.one) for p in (signed.one / "_aot").rglob("*") if p.is_file()
    )
    assert len(names) == 5
    for i, name in enumerate(names):
        for j, tamper in enumerate((_flip, _append, Path.unlink)):
            item = Path(shutil.copytree(signed.one, tmp_path / f"{i}-{j}"))
            tamper(item / name)
            outcome = support.restore(item, signed.trust)
            assert {*outcome.reasons} <= {"UNTRUSTED", "CORRUPT"}, (name, outcome.text)
            assert outcome.verdict == "REFUSED"
            assert outcome.loads == 0
            assert outcome.weights


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def test_payload_and_manifest_that_fit_each_other_do_not_pass(copy: Path, signed: Signed) -> None:
    """Whoever can repair every digest still cannot sign."""
    path = copy / "_aot/manifest.json"
    document = json.loads(path.read_bytes())
    document["body"]["created_by"]["host"] = "elsewhere"
    text = json.dumps(document["body"], separators=(",", ":"))
    digest = signing.hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{{"format":"orbax-aot","version":[1,0],"sha256":"{digest}","body":{text}}}')
    assert support.restore(copy).verdict == "LOADED"  # by its digests it is whole
    _require_untrusted(copy, signed.trust, "does not fit (changed since: manifest.json)")


def test_unsigned_is_untrusted(item: Path, signed: Signed) -> None:
    _require_untrusted(item, signed.trust, f"UNTRUSTED: {item}/_aot: not signed")


def test_signed_by_another_key_is_untrusted(copy: Path, tmp_path: Path) -> None:
    _, public = signing_support.make_key(tmp_path, "theirs")
    _require_untrusted(copy, oaot.Trust.signed(public), "the signature does not fit")


@pytest.mark.parametrize("name", ["x", ".gitignore", "step/0/more.zst", "__pycache__/x.pyc"])
def test_an_added_file_is_caught(copy: Path, signed: Signed, name: str) -> None:
    (copy / "_aot" / name).parent.mkdir(exist_ok=True)
    (copy / "_aot" / name).write_bytes(b"x")
    _require_untrusted(copy, signed.trust, "not a file of this manifest")


def test_the_folder_of_another_step_is_caught(copy: Path, signed: Signed) -> None:
    shutil.rmtree(copy / "_aot")
    shutil.copytree(signed.two / "_aot", copy / "_aot")
    _require_untrusted(copy, signed.trust, "signed as part of another item")


@pytest.mark.parametrize(
    "name", ["item.json", "manifest.sig", "manifest.json", "step/0/0.pjrt.zst"]
)
def test_a_file_of_another_step_is_caught(copy: Path, signed: Signed, name: str) -> None:
    shutil.copy(signed.two / "_aot" / name, copy / "_aot" / name)
    if (copy / "_aot" / name).read_bytes() == (signed.one / "_aot" / name).read_bytes():
        pytest.skip("both steps have the same file")
    _require_untrusted(copy, signed.trust)


def test_copying_and_moving_a_step_is_no_attack(copy: Path, signed: Signed, tmp_path: Path) -> None:
    moved = copy.rename(tmp_path / "elsewhere")
    assert support.restore(moved, signed.trust).verdict == "LOADED"


def test_signing_afterwards_is_as_good(item: Path, signed: Signed) -> None:
    assert oaot.sign(item, private_key=signed.private) == signing.epath.Path(
        item / "_aot/manifest.sig"
    )
    assert support.restore(item, signed.trust).verdict == "LOADED"


def test_signing_with_a_password(item: Path, tmp_path: Path) -> None:
    private, public = signing_support.make_key(tmp_path, "locked", b"secret")
    oaot.sign(item, private_key=private, password="secret")
    oaot.verify(item, trust=oaot.Trust.signed(public))
    policy = oaot.Trust.signed(public, private_key=private, password="secret")
    assert "secret" not in repr(policy)


def test_what_is_damaged_is_not_signed(item: Path, signed: Signed) -> None:
    _flip(item / "_aot/step/0/0.pjrt.zst")
    with pytest.raises(oaot.CorruptArtifactError, match="the stored bytes are damaged"):
        oaot.sign(item, private_key=signed.private)
    assert not (item / "_aot/manifest.sig").exists()


def test_a_certificate_vouches(item: Path, tmp_path: Path) -> None:
    key, certificate, root = signing_support.make_certificates(tmp_path, "ours")
    oaot.sign(item, private_key=key, signing_certificate=certificate)
    trust = oaot.Trust.signed(certificates=[root])
    outcome = support.restore(item, trust)
    assert outcome.verdict == "LOADED", outcome.text
    _, _, other = signing_support.make_certificates(tmp_path, "theirs")
    _require_untrusted(item, oaot.Trust.signed(certificates=[other]))


def test_signing_at_save_with_a_certificate(tmp_path: Path) -> None:
    key, certificate, root = signing_support.make_certificates(tmp_path, "ours")
    trust = oaot.Trust.signed(certificates=[root], private_key=key, signing_certificate=certificate)
    support.save(tmp_path / "item", oaot.AotHandler(trust=trust))
    assert support.restore(tmp_path / "item", trust).verdict == "LOADED"


def test_an_expired_certificate_does_not_vouch(item: Path, tmp_path: Path) -> None:
    key, certificate, root = signing_support.make_certificates(tmp_path, "old", days=-1)
    oaot.sign(item, private_key=key, signing_certificate=certificate)
    _require_untrusted(item, oaot.Trust.signed(certificates=[root]), "CN=old signer is valid from")


def test_certificates_under_names_that_only_the_library_reads_are_refused(
    item: Path, tmp_path: Path
) -> None:
    key, certificate, root = signing_support.make_certificates(tmp_path, "old", days=-1)
    oaot.sign(item, private_key=key, signing_certificate=certificate)
    path = item / "_aot/manifest.sig"
    path.write_text(path.read_text().replace('"x509CertificateChain"', '"x509_certificate_chain"'))
    _require_untrusted(item, oaot.Trust.signed(certificates=[root]))


def test_a_save_that_cannot_be_signed_still_commits(tmp_path: Path, signed: Signed) -> None:
    private, _ = signing_support.make_key(tmp_path, "soon_gone")
    handler = oaot.AotHandler(trust=oaot.Trust.signed(signed.public, private_key=private))
    private.unlink()
    support.save(tmp_path / "item", handler)
    _require_untrusted(tmp_path / "item", signed.trust, "not signed")
    assert support.restore(tmp_path / "item").verdict == "LOADED"


def test_the_library_alone_verifies_what_we_signed(signed: Signed) -> None:
    command = [
        sys.executable, "-m", "model_signing", "verify", "key", str(signed.one / "_aot"),
        "--signature", str(signed.one / "_aot/manifest.sig"), "--public_key", str(signed.public),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_variable_can_ask_for_signatures(
    item: Path, signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORBAX_AOT_TRUST", f"signed:{signed.public}")
    assert support.restore(signed.one).verdict == "LOADED"
    assert support.restore(item).reasons == ["UNTRUSTED"]


@pytest.mark.parametrize("policy", ["owner", "signed"])
def test_the_library_is_imported_only_where_it_is_used(policy: str, signed: Signed) -> None:
    trust = "Trust.owner()" if policy == "owner" else f"Trust.signed({str(signed.public)!r})"
    code = (
        "import sys, orbax_aot as oaot\n"
        f"oaot.verify({str(signed.one)!r}, trust=oaot.{trust})\n"
        "print('model_signing' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(policy == "signed"), "False"]


def test_wrong_arguments_are_refused_at_once(signed: Signed, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="public_key= or certificates=, one of the two"):
        oaot.Trust.signed()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        oaot.Trust.signed(tmp_path / "missing.pub")
    with pytest.raises(TypeError, match="pass signing_certificate= too"):
        oaot.Trust.signed(certificates=[signed.public], private_key=signed.private)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, signed: Signed) -> None:
    from orbax_aot import trust

    monkeypatch.setattr(trust.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'orbax-aot\[signing\]'"):
        oaot.Trust.signed(signed.public)


def test_copies_share_their_item_id_and_steps_do_not(
    signed: Signed, copy: Path, make_item: Callable[[str], Path]
) -> None:
    ids = [signing.item_id(signing.epath.Path(p)) for p in (signed.one, copy, signed.two)]
    assert ids[0] == ids[1] != ids[2]

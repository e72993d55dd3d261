"""Signatures over an `_aot` folder, made and verified by OpenSSF model-signing. Imports no jax.

A signature covers every file of the folder, among them `item.json`, which names the item that the folder belongs to by
what Orbax's own index of the item holds. The library is imported when it is used: that takes seconds.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import logging as std_logging
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from etils import epath

from orbax_aot import files, locations, store, strict_json
from orbax_aot import manifest as m
from orbax_aot import trust as trust_lib
from orbax_aot.errors import CorruptArtifactError, UntrustedArtifactError

# What Orbax writes once for an item and never changes. `manifest.ocdbt` names the files that hold the arrays, under
# random names, so no two steps have the same. `metadata` is that of an item without a state.
_INDEX = ("_METADATA", "manifest.ocdbt", "metadata")
_MAX_INDEX_NBYTES = 256 << 20
_MAX_SIGNATURE_NBYTES = 256 << 20
_MAX_ITEM_NBYTES = 4096
_SHOWN = 5


def item_id(item: epath.Path) -> str:
    """Returns what tells an item from all others: a digest of Orbax's index of it.

    Copies of a step have the same.

    Raises:
      OSError: the index cannot be read.
      CorruptArtifactError: there is none.
    """
    found = hashlib.sha256()
    names = []
    for name in _INDEX:
        path = item / name
        if not path.exists():
            continue
        if path.stat().length > _MAX_INDEX_NBYTES:
            raise CorruptArtifactError(f"{path}: larger than {_MAX_INDEX_NBYTES} bytes.")
        names.append(name)
        found.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    if not names:
        raise CorruptArtifactError(f"{item}: holds none of {', '.join(_INDEX)}.")
    return f"sha256:{found.hexdigest()}"


# -- sign ------------------------------------------------------------------------------------------------------------


def sign(
    path: epath.PathLike,
    *,
    private_key: os.PathLike[str] | str,
    password: str | None = None,
    signing_certificate: os.PathLike[str] | str | None = None,
    certificates: tuple[os.PathLike[str] | str, ...] = (),
) -> epath.Path:
    """Signs the executables of a committed step; returns the signature file.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      private_key: PEM file of an elliptic-curve key.
      password: of the key.
      signing_certificate: PEM file of the signer's certificate, for those who verify by certificates.
      certificates: PEM files of the certificates between it and the root, which are stored with the signature.

    Raises:
      ImportError: the extra `signing` is not installed.
      NoExecutablesError: nothing was saved there, or several items were.
      CorruptArtifactError: something is damaged already, which a signature would seem to vouch for.
    """
    trust_lib.require_library()
    place = store.Store(locations.find_item(path))
    manifest, content = place.open_manifest()
    require_whole(place, manifest)
    sign_item(place, manifest, content, private_key, password, signing_certificate, certificates)
    return place.folder / store.SIGNATURE


def sign_item(
    place: store.Store,
    manifest: m.Manifest,
    content: files.Content,
    private_key: os.PathLike[str] | str,
    password: str | None = None,
    signing_certificate: os.PathLike[str] | str | None = None,
    certificates: tuple[os.PathLike[str] | str, ...] = (),
) -> None:
    """Signs one item, whose state is complete. Raises what goes wrong."""
    from model_signing import signing

    about = json.dumps({"item": item_id(place.item)}).encode()
    with _snapshot(place, manifest, {store.MANIFEST: content.data, store.ITEM: about}) as folder:
        config = signing.Config().set_hashing_config(_hashing())
        if signing_certificate is None:
            # The library hands the password on as it is, to a function that takes bytes.
            secret: Any = None if password is None else password.encode()
            config.use_elliptic_key_signer(private_key=os.fspath(private_key), password=secret)
        else:
            config.use_certificate_signer(
                private_key=os.fspath(private_key),
                signing_certificate=os.fspath(signing_certificate),
                # It takes no empty chain.
                certificate_chain=[os.fspath(c) for c in certificates or (signing_certificate,)],
            )
        output = os.path.join(os.path.dirname(folder), store.SIGNATURE)
        config.sign(folder, output)
        with open(output, "rb") as f:
            signature = f.read()
    place.write(store.ITEM, about)
    place.write(store.SIGNATURE, signature)


def _hashing() -> Any:
    """Returns how files are hashed: all of them, none through a link, the signature itself aside."""
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[store.SIGNATURE], ignore_git_paths=False)


# -- verify ----------------------------------------------------------------------------------------------------------


def verify(path: epath.PathLike, *, trust: trust_lib.Trust | None = None) -> m.Manifest:
    """Checks every byte of the executables of a committed step; returns its manifest.

    Args:
      path: a checkpoint root (its latest step is taken), a step or an item.
      trust: who is trusted; by default `Trust.owner()`, or what `ORBAX_AOT_TRUST` says.

    Raises:
      CorruptArtifactError: files are damaged, missing, or not the manifest's; the message lists them.
      UntrustedArtifactError: they are whole, but not trusted.
      NoExecutablesError: nothing was saved there, or several items were.
    """
    policy = (trust or trust_lib.Trust.owner()).effective()
    place = store.Store(locations.find_item(path))
    manifest, content = place.open_manifest()
    require_whole(place, manifest)
    standing = policy.judge(place, manifest, content)
    if standing.native:
        raise UntrustedArtifactError(f"{standing.native}.")
    return manifest


def require_whole(place: store.Store, manifest: m.Manifest) -> None:
    """Raises `CorruptArtifactError` unless the files are those of the manifest, byte by byte."""
    problems = _listing_problems(place, manifest)
    for name, file in m.files_of(manifest.body).items():
        try:
            _require_file(place, name, file)
        except (CorruptArtifactError, OSError) as e:
            problems.append(str(e))
    if problems:
        listed = "\n  ".join(sorted(set(problems)))
        raise CorruptArtifactError(f"{place.folder}: not as it was saved:\n  {listed}")


def _require_file(place: store.Store, name: str, file: m.File) -> None:
    """Raises unless a file has both digests that the manifest gives, with what was cut out of it put back in."""
    cuts = file.cuts if isinstance(file, m.CutFile) else ()
    parts = [(c.at, store.unpack(place.read(c.file, c), c, c.file)) for c in cuts]
    store.unpack(place.read(name, file), file, f"{place.folder / name}", parts)


def _listing_problems(place: store.Store, manifest: m.Manifest) -> list[str]:
    """Returns which files are there beside those of the manifest, as sentences."""
    own = {store.MANIFEST, store.SIGNATURE, store.ITEM}
    extra = sorted({*files.names(place.folder)} - {*m.files_of(manifest.body)} - own)
    return [f"{place.folder / name}: not a file of this manifest." for name in extra[:_SHOWN]]


def find_flaw(
    place: store.Store, manifest: m.Manifest, content: files.Content, policy: trust_lib.Trust
) -> str:
    """Returns why the signature does not vouch for this manifest and its files; "" where it does. May raise.

    What is verified is a private copy, and the manifest in it is the one in `content`. Files that are read later are
    compared with its digests, so that nothing can be exchanged in between.
    """
    if not manifest.is_readable:
        return ""
    try:
        signature = files.read(place.folder, store.SIGNATURE, _MAX_SIGNATURE_NBYTES).data
        about = files.read(place.folder, store.ITEM, _MAX_ITEM_NBYTES).data
    except FileNotFoundError:
        return f"{place.folder}: not signed"
    if problems := _listing_problems(place, manifest):
        return problems[0].rstrip(".")
    known = {store.MANIFEST: content.data, store.ITEM: about}
    with _snapshot(place, manifest, known) as folder:
        output = os.path.join(os.path.dirname(folder), store.SIGNATURE)
        with open(output, "wb") as f:
            f.write(signature)
        try:
            strict_json.require(signature)
            if policy.certificates:
                _require_valid_now(signature)
            _verify_folder(folder, output, policy)
        except Exception as e:
            return f"{place.folder}: the signature does not fit ({_explain(e)})"
    if _declared_item(about) != item_id(place.item):
        return f"{place.folder}: signed as part of another item"
    return ""


def _verify_folder(folder: str, signature: str, policy: trust_lib.Trust) -> None:
    from model_signing import verifying

    config = verifying.Config().set_hashing_config(_hashing())
    if policy.certificates:
        config.use_certificate_verifier(certificate_chain=list(policy.certificates))
    else:
        assert policy.public_key is not None
        config.use_elliptic_key_verifier(public_key=policy.public_key)
    config.verify(folder, signature)


def _require_valid_now(signature: bytes) -> None:
    """Raises `ValueError` for certificates that are not valid today.

    The library takes the time at which the signer's certificate began to be valid, so that none ever expires.
    """
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    for raw in _certificates_of(signature):
        certificate = x509.load_der_x509_certificate(raw)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ValueError(
                f"the certificate {certificate.subject.rfc4514_string()} is valid from "
                f"{certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"
            )


def _certificates_of(signature: bytes) -> list[bytes]:
    """Returns the certificates of a signature file, in DER. Names that its reader could take for others are refused."""
    material = json.loads(signature)["verificationMaterial"]
    unknown = {*material} - {"x509CertificateChain", "tlogEntries", "timestampVerificationData"}
    chain = material["x509CertificateChain"]
    if unknown or {*chain} != {"certificates"}:
        raise ValueError("the signature file holds unknown fields")
    return [base64.b64decode(c["rawBytes"], validate=True) for c in chain["certificates"]]


def _declared_item(about: bytes) -> str:
    try:
        strict_json.require(about)
        return str(json.loads(about)["item"])
    except (ValueError, KeyError, TypeError):
        return ""


@contextlib.contextmanager
def _snapshot(place: store.Store, manifest: m.Manifest, known: dict[str, bytes]) -> Iterator[str]:
    """Copies the folder to where nobody else can write; yields the copy, which also is named `_aot`."""
    with tempfile.TemporaryDirectory(prefix="orbax_aot_") as private, _quiet():
        folder = os.path.join(private, store.FOLDER)
        for name, data in known.items():
            _write_copy(folder, name, data)
        for name, file in m.files_of(manifest.body).items():
            _write_copy(folder, name, place.read(name, file))
        yield folder


def _write_copy(folder: str, name: str, data: bytes) -> None:
    target = os.path.join(folder, *files.require_name(epath.Path(folder), name))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as f:
        f.write(data)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the library's notes on certificates without key usage out of the job's log."""
    logger = std_logging.getLogger("model_signing")
    before = logger.level
    logger.setLevel(std_logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _explain(error: BaseException) -> str:
    """Returns what the library found, without the digests that it prints."""
    changed = re.findall(r"Hash mismatch for \W*([\w./-]+)", str(error))
    if changed:
        return f"changed since: {', '.join(changed[:_SHOWN])}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

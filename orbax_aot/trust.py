"""Whose code may run: policies about owners and signatures. Imports no jax.

A policy looks at an `_aot` folder and says what stands against its native code and against its StableHLO. What follows
from that is decided in `plan.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence

from absl import logging
from etils import epath

from orbax_aot import files, owners, store
from orbax_aot import manifest as m

_KINDS = ("owner", "anyone", "signed", "portable_only", "never")


@dataclasses.dataclass(frozen=True)
class Standing:
    """What stands against the code of an `_aot` folder: sentences, "" where nothing does.

    `admit` is asked about each file of native code that is opened, since it may have another owner than the manifest.
    `confined` StableHLO comes from no trusted source: it may be compiled, but calls nothing outside itself.
    """

    native: str = ""
    portable: str = ""
    confined: bool = False
    admit: store.Admit | None = None


@dataclasses.dataclass(frozen=True)
class Trust:
    """Whose executables a restore may load. Made by `owner`, `anyone`, `signed`, `portable_only` or `never`.

    Loading an executable runs native code, with all that this process may do. What is not trusted is not loaded: the
    live function is compiled instead, or StableHLO where the policy allows that, and the reason is `UNTRUSTED`. The
    weights come back in any case.
    """

    kind: str
    owners: frozenset[int] = frozenset()
    public_key: str | None = None
    certificates: tuple[str, ...] = ()
    private_key: str | None = None
    signing_certificate: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    portable: bool = True
    note: str = ""

    @staticmethod
    def owner(*more_owners: str | int, portable: bool = True) -> Trust:
        """Native code from files that we, root or `more_owners` own and nobody else can write: the default.

        Protects against other users of a shared file system. Does not protect against whoever is us or root, nor on
        file systems without owners: on an object store the bucket's permissions decide. With `portable`, StableHLO
        from other owners is still compiled, unless it calls something outside itself.

        Raises:
          ValueError: there is no such user here.
        """
        return Trust("owner", owners=frozenset(map(owners.resolve, more_owners)), portable=portable)

    @staticmethod
    def anyone() -> Trust:
        """Native code from anyone who could write the files. Their digests are checked all the same."""
        return Trust("anyone")

    @staticmethod
    def signed(
        public_key: os.PathLike[str] | str | None = None,
        *,
        certificates: Sequence[os.PathLike[str] | str] = (),
        private_key: os.PathLike[str] | str | None = None,
        signing_certificate: os.PathLike[str] | str | None = None,
        password: str | None = None,
        portable: bool = False,
    ) -> Trust:
        """Code from steps that carry a valid signature. Needs the extra `signing`.

        Args:
          public_key: PEM file of the elliptic-curve key that signatures are verified by; or else
          certificates: PEM files of the certificates that may have issued the signer's.
          private_key: PEM file; where given, what is saved is signed with it, by the primary process.
          signing_certificate: PEM file of the signer's own certificate, to sign with where `certificates` verify.
          password: of the private key.
          portable: whether StableHLO without a valid signature may be compiled, unless it calls something outside
            itself. Whoever can write it decides what it computes.

        Raises:
          TypeError: not exactly one of `public_key` and `certificates` was given, or no certificate to sign with.
          FileNotFoundError: there is no such file.
          ImportError: the extra is not installed.
        """
        if (public_key is None) == (not certificates):
            raise TypeError("Trust.signed takes public_key= or certificates=, one of the two.")
        if isinstance(certificates, str | os.PathLike):
            raise TypeError("Trust.signed(certificates=...) takes a sequence of files.")
        if private_key is not None and certificates and signing_certificate is None:
            raise TypeError(
                "Trust.signed: to sign with certificates, pass signing_certificate= too."
            )
        require_library()
        return Trust(
            "signed",
            public_key=_require_file(public_key),
            certificates=tuple(str(_require_file(c)) for c in certificates),
            private_key=_require_file(private_key),
            signing_certificate=_require_file(signing_certificate),
            password=password,
            portable=portable,
        )

    @staticmethod
    def portable_only() -> Trust:
        """No native code at all: the live function or StableHLO is compiled."""
        return Trust("portable_only")

    @staticmethod
    def never() -> Trust:
        """Nothing of what is saved beside the weights: only live functions, compiled as jit would."""
        return Trust("never", portable=False)

    def effective(self) -> Trust:
        """Returns this policy, unless the environment variable `ORBAX_AOT_TRUST` names another.

        It holds `owner`, `anyone`, `portable_only`, `never` or `signed:<public key file>`. What it holds instead is
        no way to more trust: nothing is loaded then.
        """
        asked = os.environ.get("ORBAX_AOT_TRUST", "").strip()
        if not asked:
            return self
        kind, _, argument = asked.partition(":")
        try:
            if kind == "signed":
                return dataclasses.replace(Trust.signed(argument), private_key=self.private_key)
            if kind in _KINDS and not argument:
                return getattr(Trust, kind)()
            why = f"is none of {', '.join(_KINDS)}"
        except (OSError, ImportError) as e:
            why = str(e)
        logging.warning("ORBAX_AOT_TRUST=%s: %s; nothing is loaded.", asked, why)
        return dataclasses.replace(Trust.never(), note=f"ORBAX_AOT_TRUST={asked}: {why}")

    def judge(self, place: store.Store, manifest: m.Manifest, content: files.Content) -> Standing:
        """Says what stands against the code of an `_aot` folder whose manifest has been read. Never raises.

        Costs one more look at the folder; a signature, reading all its files.
        """
        try:
            why = self._find_distrust(place, manifest, content)
        except Exception as e:
            why = f"{place.folder}: {type(e).__name__}: {e}"
        admit = self._admit if self.kind == "owner" else None
        if self.kind == "portable_only":
            return Standing(native=why, confined=True)
        if not why:
            return Standing(admit=admit)
        return Standing(native=why, portable="" if self.portable else why, confined=True)

    def _find_distrust(
        self, place: store.Store, manifest: m.Manifest, content: files.Content
    ) -> str:
        if self.kind == "anyone":
            return ""
        if self.kind == "never":
            return self.note or "the policy is Trust.never()"
        if self.kind == "portable_only":
            return "the policy is Trust.portable_only()"
        if self.kind == "signed":
            from orbax_aot import signing

            return signing.find_flaw(place, manifest, content, self)
        return self._admit(content.status, str(place.manifest_path)) or self._admit(
            files.folder_status(place.folder), str(place.folder)
        )

    def _admit(self, status: os.stat_result | None, path: str) -> str:
        if status is None:  # an object store, where the bucket's permissions decide
            return ""
        return owners.find_distrust(status, path, self.owners)


def require_library() -> None:
    """Raises `ImportError` unless what signs and verifies is installed. Does not import it, which takes seconds."""
    missing = [n for n in ("model_signing", "OpenSSL") if importlib.util.find_spec(n) is None]
    if missing:
        raise ImportError(
            f"Signatures need {' and '.join(missing)}: pip install 'orbax-aot[signing]'."
        )


def _require_file(path: os.PathLike[str] | str | None) -> str | None:
    if path is None:
        return None
    if not epath.Path(path).is_file():
        raise FileNotFoundError(f"Trust.signed: there is no file {os.fspath(path)}.")
    return os.path.abspath(os.fspath(path))

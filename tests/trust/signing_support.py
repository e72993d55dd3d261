"""Keys and certificates for the tests of signatures."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)


def make_key(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Writes a key pair; returns the private and the public file."""
    key = ec.generate_private_key(ec.SECP256R1())
    protection = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, protection))
    public.write_bytes(
        key.public_key().public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def make_certificates(folder: Path, name: str, days: float = 365) -> tuple[Path, Path, Path]:
    """Writes a root and a signer's certificate under it; returns key, certificate and root.

    The signer's is valid from two years ago until `days` from now.
    """
    root_key = ec.generate_private_key(ec.SECP256R1())
    signer_key = ec.generate_private_key(ec.SECP256R1())
    root = _certificate(f"{name} root", root_key, f"{name} root", root_key, 3650, True)
    signer = _certificate(f"{name} signer", signer_key, f"{name} root", root_key, days, False)
    key_file, signer_file, root_file = (
        folder / f"{name}-{part}.pem" for part in ("key", "signer", "root")
    )
    key_file.write_bytes(
        signer_key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    signer_file.write_bytes(signer.public_bytes(_PEM))
    root_file.write_bytes(root.public_bytes(_PEM))
    return key_file, signer_file, root_file


def _certificate(
    subject: str, key: Any, issuer: str, issuer_key: Any, days: float, authority: bool
) -> x509.Certificate:
    named = lambda text: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 730 * _DAY)
        .not_valid_after(now + days * _DAY)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(issuer_key, hashes.SHA256())
    )

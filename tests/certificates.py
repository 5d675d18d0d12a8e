"""Certificates for this machine: one that has signed itself, and those of an authority."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate_in(folder: Path, *names: str) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and names, and its key, into a folder, and return their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _write(folder, _build(key, names, issuer="store", is_authority=True).sign(key, hashes.SHA256()), key)


class Authority:
    """An authority that signs certificates for this machine."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = _build(self._key, (), subject="authority", issuer="authority", is_authority=True)
        self._certificate = built.sign(self._key, hashes.SHA256())

    def sign_in(self, folder: Path) -> None:
        """Write a new certificate and its key into a folder, and the authority's own as `ca.pem`."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write(folder, _build(key, (), issuer="authority").sign(self._key, hashes.SHA256()), key)
        (folder / "ca.pem").write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))


def _build(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    *,
    issuer: str,
    subject: str = "store",
    is_authority: bool = False,
) -> x509.CertificateBuilder:
    issued_by, issued_to = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (issuer, subject))
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    built = x509.CertificateBuilder(issued_by, issued_to, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([address, *map(x509.DNSName, names)]), critical=False)
    return built.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)


def _write(folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"

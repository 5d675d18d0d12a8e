"""A certificate for this machine that has signed itself."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate_in(folder: Path, *names: str) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and names, and its key, into a folder, and return their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([address, *map(x509.DNSName, names)]), critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = built.sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"

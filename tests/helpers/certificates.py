"""Certificates for tests: an authority of one's own, and what it signs. Made anew each time."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    certfile: Path
    """Of a server on the loopback device, or of a client."""

    keyfile: Path
    encrypted_keyfile: Path
    """The same key, behind a passphrase."""


def make_certificates(folder: Path) -> Certificates:
    """An authority, and a certificate for `localhost` and 127.0.0.1."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _sign(authority_key, "authority", authority_key, is_authority=True)
    certificate = _sign(key, "localhost", authority_key)
    secret = serialization.BestAvailableEncryption(b"passphrase")
    files = {
        "authority.pem": authority.public_bytes(serialization.Encoding.PEM),
        "cert.pem": certificate.public_bytes(serialization.Encoding.PEM),
        "key.pem": _pem(key, serialization.NoEncryption()),
        "encrypted.pem": _pem(key, secret),
    }
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Certificates(*(folder / name for name in files))


def _pem(
    key: ec.EllipticCurvePrivateKey, secret: serialization.KeySerializationEncryption
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


def _sign(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    authority_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )

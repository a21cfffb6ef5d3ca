"""TLS of the HTTP port. Used by `process`, and by the command, which tries it before a model
loads."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM, as uvicorn and vLLM name them."""

    certfile: Path
    """The server's certificate, and those between it and a known one."""

    keyfile: Path | None = None
    """Its private key; None: in the same file."""

    ca_certs: Path | None = None
    """Who may have signed clients' certificates."""

    cert_reqs: int = ssl.CERT_NONE
    """Whether clients show one: 0 no, 1 if they have one, 2 yes."""


def make_context(config: TlsConfig) -> ssl.SSLContext:
    """What the port speaks: TLS 1.2 and newer.

    Raises:
        ConfigError: a file is missing, is something else, or asks for a passphrase; or key and
            certificate do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for file in (config.certfile, config.keyfile, config.ca_certs):
        if file is not None:
            _check_readable(file)
    try:
        context.load_cert_chain(config.certfile, config.keyfile, _no_passphrase)
    except _EncryptedKeyError as error:
        key = config.keyfile or config.certfile
        raise ConfigError(
            f"the key in {key} is encrypted, and nobody is there to type its passphrase; decrypt it"
            " with: openssl pkey -in KEY -out PLAIN_KEY"
        ) from error
    except ssl.SSLError as error:
        key = config.keyfile or config.certfile
        raise ConfigError(
            f"--ssl-certfile {config.certfile} and --ssl-keyfile {key} cannot be used:"
            f" {_reason(error)}"
        ) from error
    if config.ca_certs is not None:
        try:
            context.load_verify_locations(config.ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ca_certs} cannot be used: {_reason(error)}"
            ) from error
    context.verify_mode = ssl.VerifyMode(config.cert_reqs)
    return context


class _EncryptedKeyError(Exception):
    """OpenSSL has asked for a passphrase."""


def _no_passphrase() -> str:
    raise _EncryptedKeyError


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no certificate or no key in it").lower().replace("_", " ")

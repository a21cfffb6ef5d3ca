"""Keys and TLS of a server, from flags, files and variables. Used by `launch` and `cli`."""

import stat
from collections.abc import Sequence
from pathlib import Path

from api.keys import AccessConfig, Keys, hashes_of, read_file
from api.tls import TlsConfig, make_context
from cluster.config import ServeConfig
from engine.errors import ConfigError


def check(config: ServeConfig) -> None:
    """Raise ConfigError unless keys and files of TLS can be used."""
    access_config(config)
    tls_config(config)


def access_config(config: ServeConfig) -> AccessConfig:
    """Which keys open what.

    Raises:
        ConfigError: a key or a file of keys cannot be one, or the settings contradict each other.
    """
    variables = config.environment
    api = _keys(config.api_key, config.api_key_file, "RAYWIRE_API_KEY", variables.api_keys)
    metrics = _keys((), config.metrics_key_file, "RAYWIRE_METRICS_KEY", variables.metrics_keys)
    admin = _keys((), config.admin_key_file, "RAYWIRE_ADMIN_KEY", variables.admin_keys)
    if set(_all(admin)) & {*_all(api), *_all(metrics)}:
        raise ConfigError("an administrator's key is also one of another kind; give it its own")
    if config.prefix_cache_salt_per_key and not api:
        raise ConfigError("--prefix-cache-salt-per-key needs keys: see --api-key-file")
    if config.open_metrics and metrics:
        raise ConfigError("--open-metrics does not go with a key for metrics")
    return AccessConfig(
        api=api,
        metrics=metrics,
        has_open_metrics=config.open_metrics,
        admin=admin,
        salts_prefix_cache=config.prefix_cache_salt_per_key,
    )


def secrets_for_nodes(config: ServeConfig) -> dict[str, str]:
    """All keys as variables, for a server that runs elsewhere: files are read here."""
    variables = config.environment
    return {
        "RAYWIRE_API_KEY": _joined(config.api_key_file, *config.api_key, *variables.api_keys),
        "RAYWIRE_METRICS_KEY": _joined(config.metrics_key_file, *variables.metrics_keys),
        "RAYWIRE_ADMIN_KEY": _joined(config.admin_key_file, *variables.admin_keys),
    }


def tls_config(config: ServeConfig) -> TlsConfig | None:
    """What the HTTP port speaks; None: plain HTTP.

    Raises:
        ConfigError: the files cannot be used.
    """
    if config.ssl_certfile is None:
        return None
    tls = TlsConfig(
        certfile=config.ssl_certfile,
        keyfile=config.ssl_keyfile,
        ca_certs=config.ssl_ca_certs,
        cert_reqs=config.ssl_cert_reqs,
    )
    make_context(tls)
    return tls


def warnings(config: ServeConfig) -> list[str]:
    """What the user may not know of the keys, a line each."""
    lines = []
    if config.api_key:
        lines.append(
            "a key in the command line is seen by all users of this machine until it is hidden, and"
            " stays in the shell's history: use --api-key-file or RAYWIRE_API_KEY"
        )
    files = (config.api_key_file, config.metrics_key_file, config.admin_key_file)
    return lines + [
        f"{file} can be read by every user of this machine: chmod 600 {file}"
        for file in files
        if file is not None and file.stat().st_mode & stat.S_IROTH
    ]


def _keys(given: Sequence[str], file: Path | None, variable: str, in_it: Sequence[str]) -> Keys:
    hashes = hashes_of(given, "--api-key") + hashes_of(in_it, variable)
    if file is not None:
        hashes_of(read_file(file), str(file))  # a mistake in it ends the start here
    return Keys(hashes=tuple(dict.fromkeys(hashes)), file=file)


def _all(keys: Keys) -> tuple[bytes, ...]:
    """The hashes of all keys, as they are now."""
    in_file = () if keys.file is None else hashes_of(read_file(keys.file), str(keys.file))
    return keys.hashes + in_file


def _joined(file: Path | None, *keys: str) -> str:
    return " ".join([*keys, *(() if file is None else read_file(file))])

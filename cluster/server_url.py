"""Where a running server is, as people say it to the commands that ask one. Pure."""

import re
from urllib.parse import urlsplit

from engine.errors import ConfigError


def server_url(given: str) -> str:
    """Its URL, without a slash at the end. Of `host:port` it is that of plain HTTP.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    whole = given if re.match(r"\w+:/", given) else f"http://{given}"
    try:
        url = urlsplit(whole)
        is_url = (
            (url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0)
            and not (url.query or url.fragment)  # a path is put behind it
            and "//" not in url.path
        )
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{given!r} is no URL such as http://127.0.0.1:8000")
    return whole.rstrip("/")

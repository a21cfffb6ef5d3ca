"""Who may use which route.

Decided on the route that a request has reached, not on its path: `app.all_routes` puts the guard
around every endpoint, so a new route is covered unless its `access` says otherwise, and no spelling
of a path leads round it. What reaches no route at all needs a key as well.

    open      probes: nobody has to have a key
    key       the API's keys                                     (the default)
    metrics   a key for metrics, or one of the API's
    admin     an administrator's key, and no web site in between; without such a key the route is
              not there
"""

import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from api import tenant
from api.errors import HttpError
from api.keys import AccessConfig, KeyRing
from api.routing import Access, Route
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)

_MAX_OFFERED_BYTES = 1024
"""Twice the longest key: what is longer is not looked at."""

_RESERVED = ("localhost", "local", "internal", "svc")
"""Ends of names that nobody can register: a machine's own, and those inside of a cluster."""


class Guard:
    """The guard of one API server.

    Args:
        config: which keys there are.
        allowed_origins: web sites that the server is for.

    Raises:
        ConfigError: a file of keys cannot be used.
    """

    def __init__(self, config: AccessConfig, allowed_origins: Iterable[str] = ()) -> None:
        self._config = config
        self._api = KeyRing(config.api)
        self._metrics = KeyRing(config.metrics)
        self._admin = KeyRing(config.admin)
        self._origins = frozenset(allowed_origins)
        self._refused = ThinnedCount()

    @property
    def num_refused(self) -> int:
        """Requests without a valid key so far."""
        return self._refused.count

    @property
    def has_admin(self) -> bool:
        """Whether there are routes for an administrator."""
        return bool(self._config.admin)

    def over(self, route: Route) -> Route:
        """The route, behind the guard."""
        if not self._is_guarded(route.access):
            return route
        access, endpoint = route.access, route.endpoint

        async def guarded(request: Request) -> Response:
            self.check(request.scope, access)
            return await endpoint(request)

        return replace(route, endpoint=guarded)

    def check(self, scope: Scope, access: Access = "key") -> None:
        """Let a request pass.

        Raises:
            HttpError: 401, it has no valid key; 403, a web site may have sent it.
        """
        if not self._is_guarded(access):
            return
        offered = _offered(scope)
        match access:
            case "open":
                return
            case "key":
                key_hash = _find(self._api, offered)
                if key_hash is not None and self._config.salts_prefix_cache:
                    tenant.salt.set(tenant.salt_of(key_hash))
            case "metrics":
                key_hash = _find(self._metrics, offered) or _find(self._api, offered)
            case "admin":
                self._check_no_web_site(scope)
                key_hash = _find(self._admin, offered)
            case _:
                assert_never(access)
        if key_hash is None:
            raise self._refusal(scope, has_offered=bool(offered))

    def _is_guarded(self, access: Access) -> bool:
        config = self._config
        match access:
            case "open":
                return False
            case "key":
                return bool(config.api)
            case "metrics":
                return bool(config.metrics or config.api) and not config.has_open_metrics
            case "admin":
                return True
            case _:
                assert_never(access)

    def _refusal(self, scope: Scope, *, has_offered: bool) -> HttpError:
        if self._refused.add():
            logger.warning(
                "refused a request without a valid key num_refused=%d client=%s",
                self._refused.count,
                scope["client"] and scope["client"][0],
            )
        why = "this key is not valid" if has_offered else "a key is needed"
        challenge = 'Bearer realm="raywire"' + ', error="invalid_token"' * has_offered
        return HttpError(
            401,
            f"{why}: send Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
            headers={"www-authenticate": challenge},
        )

    def _check_no_web_site(self, scope: Scope) -> None:
        """Scripts of a web site say where they are from. One whose name has been pointed at us
        (DNS rebinding) says its own name for ours."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site", "none")
        if (origin is not None or site != "none") and origin not in self._origins:
            raise _forbidden(
                "web sites may not use this route, unless --allowed-origins names them"
            )
        if not is_own_name(headers.get(b"host", "")):
            raise _forbidden(
                "ask for this route by an address, localhost or a name inside of the cluster"
            )


def is_own_name(host: str) -> bool:
    """Whether a `Host` header has a name that nobody outside can point at us."""
    name = host.rpartition(":")[0] if host[-1:].isdigit() and ":" in host else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        *_, end = name.lower().removesuffix(".").split(".")
        return bool(end) and ("." not in name or end in _RESERVED)
    return True


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, code="forbidden")


def _offered(scope: Scope) -> list[bytes]:
    """The keys that a request brings: OpenAI's clients send one header, Anthropic's the other."""
    offered = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                offered.append(key.strip())
        elif name == b"x-api-key":
            offered.append(value)
    return offered[:2]


def _find(ring: KeyRing, offered: Iterable[bytes]) -> bytes | None:
    """The hash of the first key that is on the ring."""
    for key in offered:
        if len(key) <= _MAX_OFFERED_BYTES and (found := ring.find(key)) is not None:
            return found
    return None

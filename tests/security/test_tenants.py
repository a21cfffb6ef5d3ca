"""Salts of keys: every route that generates has its requests marked with the key's salt, by
option."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from api import tenant
from api.keys import AccessConfig, Keys, hash_of
from tests.helpers.http_server import HttpServer, serving, wait_for

ONE, TWO = "sk-one", "sk-two"
ACCESS = AccessConfig(
    api=Keys(hashes=(hash_of(ONE.encode()), hash_of(TWO.encode()))), salts_prefix_cache=True
)
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "best_of": 2}),
    ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 900}]}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/invocations", {"prompt": "x"}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(access=ACCESS) as server:
        yield server


def salts(server: HttpServer, key: str, path: str, body: dict[str, Any]) -> set[str | None]:
    """Of all that reaches the engine for a request."""
    before = len(server.engine.received)
    answer = server.http.post(path, json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    wait_for(lambda: len(server.engine.received) > before, "the request at the engine")
    server.wait_idle()
    return {request.cache_salt for request in server.engine.received[before:]}


@pytest.mark.row("S-46")
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_request_has_the_salt_of_its_key(
    server: HttpServer, path: str, body: dict[str, Any]
) -> None:
    """On every route, in the background too; neither key nor hash is in it. A
    client's own salt comes behind, and cannot be somebody else's."""
    for key in (ONE, TWO):
        salt = tenant.salt_of(hash_of(key.encode()))
        assert salts(server, key, path, body) == {salt}
        assert salts(server, key, path, {**body, "cache_salt": "own"}) == {f"{salt}:own"}
        assert key not in salt
        assert hash_of(key.encode()).hex()[:8] not in salt


@pytest.mark.row("S-46")
def test_salts_of_keys_are_an_option() -> None:
    """Without it, and without keys, prefixes are shared by all, and clients' own salts count."""
    for access in (AccessConfig(), AccessConfig(api=ACCESS.api)):
        with serving(access=access) as server:
            assert salts(server, ONE, "/v1/completions", {"prompt": "x"}) == {None}
            own = {"prompt": "x", "cache_salt": "own"}
            assert salts(server, ONE, "/v1/completions", own) == {"own"}


def test_no_two_pairs_of_key_and_salt_are_the_same() -> None:
    """Whatever a client writes into its own."""
    one, two = (tenant.salt_of(hash_of(key.encode())) for key in (ONE, TWO))
    seen = []
    for own, given in itertools.product((one, two), (None, "a", f"{two}", f":{two}", f"{two}:a")):
        token = tenant.salt.set(own)
        seen.append(tenant.salted(given))
        tenant.salt.reset(token)
    assert len(set(seen)) == len(seen)

"""What the tests of clients share. A test's module says what it needs:

CLIENT = "openai"            # an environment of `environments.CLIENTS`, and scripts/with_openai.py
SERVERS = ("echo", "demo")   # which of `servers.KINDS` the script talks to
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.results import Results, run_script
from tests.clients.servers import Servers


@pytest.fixture(scope="session")
def interpreters(request: pytest.FixtureRequest) -> Iterator[dict[str, "Future[Path]"]]:
    """The environments of all clients that have tests in this run, in the making."""
    wanted = dict.fromkeys(getattr(item.module, "CLIENT", None) for item in _items(request))
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(environments.interpreter, environments.CLIENTS[name])
            for name in wanted
            if name is not None
        }


def _items(request: pytest.FixtureRequest) -> list[pytest.Function]:
    return [item for item in request.session.items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("servers")) as it:
        yield it


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, interpreters: dict[str, "Future[Path]"]) -> Path:
    """The interpreter of the module's client. Skips its tests where pip cannot get the client."""
    try:
        return interpreters[request.module.CLIENT].result()
    except environments.NotToBeHad as error:
        if os.environ.get(environments.REQUIRE) == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    python: Path,
    servers: Servers,
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """Those of the script of the module's client."""
    urls = {kind: servers[kind].url for kind in request.module.SERVERS}
    return run_script(python, request.module.CLIENT, urls, tmp_path_factory.mktemp("client"))

"""Every route is FastAPI's; the hot ones are called past it, and nobody can tell."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from api.app import FastLane, framework
from api.routing import Route
from engine.errors import InvalidRequestError

FAILURES = {"mine": InvalidRequestError("no", "x-bad"), "ours": ZeroDivisionError("oh")}


async def endpoint(request: Request) -> Response:
    if (failure := FAILURES.get(request.headers.get("x-bad", ""))) is not None:
        raise failure
    # Of a framework, the scope knows the application.
    return Response("past it" if "app" not in request.scope else "through it")


ROUTES = [Route(("POST",), "/hot", endpoint, is_hot=True), Route(("GET",), "/cold", endpoint)]


def ask(method: str, path: str, through: str = "lane", **headers: str) -> httpx.Response:
    app = framework(ROUTES)

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(
            app if through == "framework" else FastLane(app, ROUTES), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(one())


def test_hot_routes_are_called_past_the_framework() -> None:
    """And only they; but the framework has them too."""
    assert ask("POST", "/hot").text == "past it"
    assert ask("GET", "/cold").text == "through it"
    assert ask("POST", "/hot", through="framework").text == "through it"


@pytest.mark.parametrize(("bad", "status"), [("mine", 400), ("ours", 500)])
def test_errors_are_the_same_on_both_ways(bad: str, status: int) -> None:
    """The caller's and ours."""
    headers = {"x-bad": bad}
    past, through = (ask("POST", "/hot", way, **headers) for way in ("lane", "framework"))
    assert past.status_code == through.status_code == status
    assert past.json() == through.json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/hot", 405), ("POST", "/cold", 405), ("POST", "/hot/", 404), ("GET", "/HOT", 404)],
)
def test_what_is_no_route_is_not_guessed(method: str, path: str, status: int) -> None:
    """In OpenAI's shape; a 405 names what is allowed."""
    response = ask(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)

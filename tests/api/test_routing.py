"""Which endpoint answers: a table of paths."""

import pytest

from api.asgi import App, Request, Response
from api.errors import HttpError
from api.routing import Endpoint, Route, Routes


def endpoint() -> Endpoint:
    async def answer(request: Request) -> App:
        return Response()

    return answer


ALL, ONE, POSTED = endpoint(), endpoint(), endpoint()
ROUTES = Routes(
    [
        Route(("GET", "HEAD"), "/things", ALL),
        Route(("GET", "HEAD"), "/things/", ONE),
        Route(("POST",), "/posts", POSTED),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/things", ALL),
        ("HEAD", "/things/a", ONE),
        ("GET", "/things/a/b", ONE),
        ("POST", "/posts", POSTED),
    ],
)
def test_a_path_is_found_whole_or_by_its_beginning(method: str, path: str, found: Endpoint) -> None:
    """A route that ends in a slash takes all that begins with it and goes on."""
    assert ROUTES.find(method, path) is found


@pytest.mark.parametrize("path", ["/", "", "/things/", "/thing", "/posts/", "/posts/a", "/POSTS"])
def test_any_other_path_is_a_404(path: str) -> None:
    """Nothing is guessed: neither a missing slash nor one too many."""
    with pytest.raises(HttpError) as caught:
        ROUTES.find("GET", path)

    assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_another_method_is_a_405_that_names_the_right_ones() -> None:
    """For a path that is there."""
    with pytest.raises(HttpError) as caught:
        ROUTES.find("DELETE", "/things/a")

    assert caught.value.status == 405
    assert caught.value.headers == {"allow": "GET, HEAD"}

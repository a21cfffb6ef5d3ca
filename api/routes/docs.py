"""GET /openapi.json, and /docs and /redoc: a page that shows it and tries routes out.

The page is one file without anything from elsewhere, since many clusters reach nothing outside.
FastAPI's own pages load their scripts from a content delivery network.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import engine
from api import openapi
from api.routing import Route
from api.service import Service

_PAGE = Path(__file__).parent.parent / "docs.html"
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def routes(service: Service, table: Sequence[Route]) -> list[Route]:
    """`table`: all routes there are. Looked at when the document is first asked for."""
    document = _MadeOnce(lambda: _document(service, table))
    page = _MadeOnce(_PAGE.read_bytes)

    async def show_document(request: Request) -> Response:
        return Response(await document.get(service), media_type="application/json")

    async def show_page(request: Request) -> Response:
        html = await page.get(service)
        return Response(html, headers=_page_headers(html), media_type="text/html")

    def page_route(path: str, summary: str) -> Route:
        return Route(("GET",), path, show_page, summary=summary, media_type="text/html")

    return [
        Route(("GET",), "/openapi.json", show_document, summary="This document", answer=dict),
        page_route("/docs", "A page that shows this document"),
        page_route("/redoc", "The same page"),
    ]


class _MadeOnce:
    """Bytes that are made when somebody first wants them, in a thread."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: bytes | None = None

    async def get(self, service: Service) -> bytes:
        if self._made is None:
            self._made = await service.threads.run(self._make)
        return self._made


def _document(service: Service, table: Sequence[Route]) -> bytes:
    config = service.config
    return msgspec.json.encode(
        openapi.document(
            table,
            version=engine.__version__,
            model=config.served_model_names[0],
            root_path=config.root_path,
        )
    )


def _page_headers(html: bytes) -> dict[str, str]:
    """The page's own script runs and no other; it speaks to this server only."""
    found = _SCRIPT.search(html)
    assert found is not None
    script = b64encode(sha256(found[1]).digest()).decode()
    return {
        "content-security-policy": f"default-src 'none'; connect-src 'self';"
        f" script-src 'sha256-{script}'; style-src 'unsafe-inline'; base-uri 'none'",
        "x-content-type-options": "nosniff",
    }

"""Work on text that is all of a request: tokenizing, rendering, counting.

Used by the routes that ask nothing of the engine. It is done in the threads of the generating
routes (`threads`), behind what came before, and taken back where the client has gone by then.
"""

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api import client_watch
from api.service import LoadedModel, Service


async def respond(
    service: Service,
    request: Request,
    call: Callable[[LoadedModel], object],
    num_bytes: int,
    headers: dict[str, str],
) -> Response:
    """Answer a request with what `call` makes, as JSON; that is written in the thread too.

    Args:
        service: with the model.
        request: to be answered.
        call: does the work.
        num_bytes: length of the request's body.
        headers: of the answer.

    Raises:
        RequestError: from `call`.
        ServerError: the server ends meanwhile.
        ClientDisconnect: nobody is left to answer.
    """
    model = service.model
    watch = client_watch.of(request)
    has_gone = False
    work = service.threads.run(lambda: msgspec.json.encode(call(model)), num_bytes)

    def on_gone() -> None:
        nonlocal has_gone
        has_gone = True
        work.cancel()

    watch.start(on_gone)
    try:
        return Response(await work, 200, headers, "application/json")
    except asyncio.CancelledError:
        if has_gone:
            raise ClientDisconnect from None
        raise
    finally:
        watch.stop()

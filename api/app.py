"""The application: routes, errors in OpenAI's shape, and the edge around them."""

from api import errors
from api.asgi import App, ClientDisconnect, Receive, Request, Response, Scope, Send
from api.edge import Edge
from api.routes import chat, completions, health, metrics, models
from api.routing import Routes
from api.service import Service
from engine.errors import RaywireError


def build(service: Service) -> App:
    """The whole HTTP surface of one API server."""
    parts = (chat, completions, models, health, metrics)
    return Edge(_Application(Routes(r for part in parts for r in part.routes(service))), service)


class _Application:
    """Awaits the response of a request's endpoint and sends it. An error before its first byte is a
    response too; what happens later is the response's own affair."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = Request(scope, receive)
            endpoint = self._routes.find(request.method, request.path)
            response: App = await endpoint(request)
        except RaywireError as error:
            response = errors.error_response(errors.describe(error))
        except ClientDisconnect:
            response = Response(status=499)
        except Exception:
            await errors.error_response(errors.internal_failure())(scope, receive, send)
            raise  # to uvicorn, which logs its traceback
        await response(scope, receive, send)

"""The client's side of an OpenAI-compatible server: used by `run-batch`, `chat` and `complete`.

Aiohttp does the HTTP. No proxy of the environment is used: a server of one's own is meant.
"""

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from cluster.server_url import server_url
from engine.errors import ConfigError, ServerError

_CONNECT_S = 10.0
_LOOK = aiohttp.ClientTimeout(total=30.0)
"""For what needs no model, and is answered at once by any server that works."""
_MAX_MESSAGE_CHARS = 500
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""Three minutes of silence from the other host's kernel; a count, and seconds otherwise."""

_JSON = {"Content-Type": "application/json"}


class AnswerError(ServerError):
    """The server has refused a request, or has broken off its answer; the message says why."""


class ApiClient:
    """Connections to one server.

    Args:
        base_url: as `server_url` takes it, with or without `/v1` at its end.
        api_key: sent as a bearer token.
        max_connections: at a time.

    Raises:
        ConfigError: `base_url` is no URL of HTTP.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, max_connections: int = 100
    ) -> None:
        self.base_url = server_url(base_url).removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # An answer takes as long as it takes: there may be a queue before it.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, socket_factory=_kept_alive),
            headers=headers,
            timeout=timeout,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send JSON. Raises what aiohttp raises."""
        url = self.base_url + path
        async with self._session.post(url, data=body, headers=_JSON) as response:
            yield response

    async def answers(self, timeout_s: float) -> bool:
        """Whether the server says anything at all, be it a refusal."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        # On a connection of its own: those for requests may all be taken.
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
                async with session.get(f"{self.base_url}/v1/models"):
                    return True
        except (aiohttp.ClientError, OSError):  # also a TimeoutError
            return False

    async def is_ready(self) -> bool:
        """Whether a server of ours is there and has loaded its model."""
        try:
            async with self._session.get(f"{self.base_url}/ready", timeout=_LOOK) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def first_model(self) -> str:
        """The name of the first model that is served.

        Raises:
            ConfigError: there is no such server, or it does not let us in.
        """
        url = f"{self.base_url}/v1/models"
        try:
            async with self._session.get(url, timeout=_LOOK) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(
                f"no server answers at {self.base_url} ({reason(error)}); start one with"
                " `raywire serve MODEL` or name another one with --url"
            ) from error
        if response.status != 200:
            way = "; --api-key or OPENAI_API_KEY gives one" if response.status == 401 else ""
            raise ConfigError(f"{url}: {error_message(response.status, content)}{way}")
        try:
            return msgspec.json.decode(content, type=_Models).data[0].id
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(f"{url} lists no model: is it an OpenAI-compatible API?") from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator["Event"]:
        """Send a request and give its events as they come.

        Raises:
            AnswerError: the server is gone, refuses the request, or breaks off.
        """
        try:
            async with self.post(path, msgspec.json.encode({**body, "stream": True})) as response:
                if response.status != 200:
                    raise AnswerError(error_message(response.status, await response.read()))
                async for data in _events(response.content):
                    event = msgspec.json.decode(data, type=Event)
                    if event.error is not None:
                        raise AnswerError(event.error.message)
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"{self.base_url} does not answer: {reason(error)}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise AnswerError(f"not what an OpenAI-compatible server answers: {error}") from error


def _kept_alive(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices when the other host is gone, though nothing is sent for hours."""
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, up to the `[DONE]`."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()):
                if data == b"[DONE]":
                    return
                yield data


def error_message(status: int, content: bytes) -> str:
    """What an answer says of its failure, in one line."""
    try:
        message = msgspec.json.decode(content, type=_Failure).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = content.decode(errors="replace")
    return f"HTTP {status}: {' '.join(message.split())[:_MAX_MESSAGE_CHARS]}"


def reason(error: BaseException) -> str:
    """Why there is no connection, in few words."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or "not to be trusted"
        return f"its certificate: {why}; SSL_CERT_FILE=ca.pem trusts one's own"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_S:.0f} s"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # without the address, which aiohttp says too
    return str(error) or type(error).__name__


# ------------------------------------------------------------------------------------ the answers


class _Error(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """One event of a stream, of chat or completion."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None

    @property
    def text(self) -> str:
        """What the model says."""
        return "".join(choice.text or choice.delta.content or "" for choice in self.choices)

    @property
    def reasoning(self) -> str:
        """What it thinks, where the server tells that apart."""
        deltas = (choice.delta for choice in self.choices)
        return "".join(delta.reasoning or delta.reasoning_content or "" for delta in deltas)

"""The batch file format, which is OpenAI's: a line of JSON for each request and each result. Pure.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", …}}
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, …}, "error": null}

A body travels as it is, from the line to the server and from the server to the line: nobody here
has an opinion on its fields. What the server refuses has a `response` with its status; `error` is
for what has not come so far. Of a line without a `custom_id`, `error` has the number.
"""

import uuid
from typing import Any, TypeVar

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

RESULT_START = b'{"id":"batch_req_'
"""How each line of ours begins."""

T = TypeVar("T")


class BatchRequest(msgspec.Struct, frozen=True):
    """A line that can be sent."""

    line: int
    """Its number in the file, from 1."""
    custom_id: str
    url: str
    body: bytes
    """JSON."""


class BadLine(msgspec.Struct, frozen=True):
    """A line that cannot."""

    line: int
    custom_id: str | None
    """None: it has none, so that only its number tells it from others."""
    code: str
    message: str
    param: str | None = None


Line = BatchRequest | BadLine


class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw
    """JSON, without a line break."""


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None
    line: int


class Result(msgspec.Struct, frozen=True):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None

    @property
    def is_success(self) -> bool:
        return self.response is not None and 200 <= self.response.status_code < 300


class _Invalid(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


# --------------------------------------------------------------------------------------- requests


def parse_line(number: int, content: bytes) -> Line:
    """Read one line of the input, which is not empty.

    Args:
        number: of the line, from 1.
        content: with or without its end.
    """
    custom_id = None
    try:
        fields = _decode(content, dict[str, msgspec.Raw], "invalid_json_line", "a JSON object")
        custom_id = _field(fields, "custom_id", str, "a string")
        _check_choice("method", _field(fields, "method", str, "a string"), ("POST",))
        url = _field(fields, "url", str, "a string")
        _check_choice("url", url, URLS)
        body = _field(fields, "body", dict[str, msgspec.Raw], "a JSON object")
        if bytes(body.get("stream", b"null")) not in (b"null", b"false"):
            raise _Invalid("invalid_value", "a request of a batch is not streamed", "body.stream")
        if bytes(body.get("background", b"null")) not in (b"null", b"false"):
            raise _Invalid(
                "invalid_value", "a request of a batch waits for its answer", "body.background"
            )
    except _Invalid as error:
        return BadLine(number, custom_id, error.code, error.message, error.param)
    return BatchRequest(number, custom_id, url, bytes(fields["body"]))


def _field(fields: dict[str, msgspec.Raw], name: str, kind: type[T], what: str) -> T:
    if name not in fields:
        raise _Invalid("missing_required_parameter", f"{name} is missing", name)
    return _decode(bytes(fields[name]), kind, "invalid_type", what, name)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *first, last = choices
        shown = f"{', '.join(first)} or {last}" if first else last
        raise _Invalid(f"invalid_{name}", f"{name} must be {shown}, not {value[:100]!r}", name)


def _decode(content: bytes, kind: type[T], code: str, what: str, param: str | None = None) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        subject = "the line" if param is None else param
        raise _Invalid(code, f"{subject} must be {what}", param) from None


# ---------------------------------------------------------------------------------------- results


def answered(request: BatchRequest, status: int, request_id: str | None, body: bytes) -> Result:
    """The result of a request that a server has answered, however."""
    try:
        body.decode()
        compact = msgspec.json.format(body, indent=-1)  # on one line, whoever wrote it
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        start = body[:200].decode(errors="replace")
        message = f"HTTP {status} with a body that is no JSON: {start}"
        return failed(BadLine(request.line, request.custom_id, "invalid_response", message))
    response = Response(status, request_id or _new_id("req"), msgspec.Raw(compact))
    return Result(_new_id("batch_req"), request.custom_id, response, None)


def failed(line: BadLine) -> Result:
    """The result of a line that no server could answer."""
    error = LineError(line.code, line.message, line.param, line.line)
    return Result(_new_id("batch_req"), line.custom_id, None, error)


def encode(result: Result) -> bytes:
    """A line of the output, with its end."""
    return msgspec.json.encode(result) + b"\n"


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Done(msgspec.Struct):
    """What an output has already."""

    by_id: dict[str, bool] = {}
    """By custom_id, whether it succeeded."""
    bad_lines: set[int] = set()
    """Numbers of lines that had no custom_id."""

    def add(self, content: bytes) -> bool:
        """Take in one line of an output, ours or another's. False if it is no result."""
        try:
            seen = msgspec.json.decode(content, type=_Seen)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if seen.custom_id is not None:
            self.by_id[seen.custom_id] = seen.is_success
        elif isinstance(seen.error, dict) and isinstance(line := seen.error.get("line"), int):
            self.bad_lines.add(line)
        else:
            return False
        return True

    def success(self, line: Line) -> bool | None:
        """Whether a line of the input has succeeded; None: it has no result."""
        if line.custom_id is not None:
            return self.by_id.get(line.custom_id)
        return False if line.line in self.bad_lines else None


class _SeenResponse(msgspec.Struct):
    status_code: int


class _Seen(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _SeenResponse | None
    error: Any

    @property
    def is_success(self) -> bool:
        return (
            self.error is None
            and self.response is not None
            and 200 <= self.response.status_code < 300
        )

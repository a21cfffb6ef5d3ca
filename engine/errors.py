"""Every error we raise on purpose.

RaywireError
├── RequestError               the caller's fault: a 4xx that names the field
│   ├── InvalidRequestError    400
│   ├── UnsupportedFieldError  400, a field of the wire that this engine cannot serve yet
│   ├── ContextLengthError     400, context_length_exceeded
│   └── NotFoundError          404
├── ConfigError                the operator's fault: one line and exit code 2
└── ServerError                ours
    ├── WireError              bytes from a peer that break the protocol
    ├── UnavailableError       503, try again later: loading, draining
    │   └── OverloadedError    503 overloaded, load is shed
    ├── RequestFailedError     500, this request failed; others go on
    ├── FencedError            this engine core has been given up and replaced
    ├── ExecutorError          the workers have failed; the engine core cannot go on
    └── EngineDeadError        503 engine_dead, for good: the server must be restarted

Errors that multiprocessing may carry give all their arguments to `super().__init__`, or they cannot
be rebuilt.
"""

EXIT_FAILED = 1
"""Exit code of a process of ours that has failed: an engine died, or a program is wrong."""

EXIT_CONFIG = 2
"""Exit code of a process of ours, whichever, that met a ConfigError; its last words say why."""


class RaywireError(Exception):
    """Root of the tree."""


class RequestError(RaywireError):
    """The request is wrong. `param` names the field as the client wrote it."""

    status = 400
    code: str | None = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(RequestError):
    """A field is missing, of the wrong type, or out of bounds."""


class UnsupportedFieldError(RequestError):
    """The field is on the wire, but no engine of this version serves it."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """Prompt and requested tokens do not fit the model's length.

    Args:
        message, param: as in all of them.
        lengths: tokens of the prompt, and how many it may have, where that is what is wrong.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, param: str | None = None, lengths: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, param)
        self.args = (message, param, lengths)
        self.lengths = lengths


class NotFoundError(RequestError):
    """The model or route does not exist."""

    status = 404
    code = "model_not_found"


class ConfigError(RaywireError):
    """Settings or model folder cannot work. The message says what is wrong and what to do."""


class ServerError(RaywireError):
    """Our fault."""


class WireError(ServerError):
    """A peer sent bytes that break the protocol; they are counted and dropped."""


class UnavailableError(ServerError):
    """Not now: the server is loading or draining, say."""

    code = "unavailable"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class OverloadedError(UnavailableError):
    """Not now: the server has as much to do as it takes."""

    code = "overloaded"


class RequestFailedError(ServerError):
    """This one request failed inside the engine; retrying may help."""


class ExecutorError(ServerError):
    """The workers have failed. `cause` says which rank, which call, and why."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class FencedError(ServerError):
    """The server has given this engine core up: its requests are elsewhere, and it must end."""


class EngineDeadError(ServerError):
    """An engine core is gone, or what it cannot work without; its requests cannot be recovered.

    Args:
        rank: data-parallel rank of the engine core, counted over all servers; None: it is the
            coordinator or an API server that is gone.
        cause: the first cause, as far as it is known.
    """

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        if self.rank is None:
            return f"the server is ending: {self.cause}"
        return f"engine core DP{self.rank} is dead: {self.cause}"

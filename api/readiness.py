"""Whether an API server takes requests, and if not, what is missing: the body of `GET /ready`."""

from typing import Literal, assert_never

import msgspec

from api import errors
from api.errors import ErrorDetails
from api.service import Service

Status = Literal["ready", "degraded", "loading", "shedding", "draining", "hung", "dead"]


class Ranks(msgspec.Struct, frozen=True):
    """Data-parallel ranks of this server."""

    up: int
    all: int
    missing: list[str] = []
    """Those that are not up, and what they last said."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """What `/ready` says."""

    status: Status
    """Degraded: some ranks are lost, and the others take requests."""
    reason: str | None
    """Why requests are refused; null where they are not."""
    ranks: Ranks
    error: ErrorDetails | None
    """The same in OpenAI's shape, as all errors have it."""


def assess(service: Service) -> Readiness:
    """What is known now; nobody is asked."""
    engines = service.client.engines
    missing = [e for e in engines if e.state != "up"]
    ranks = Ranks(
        len(engines) - len(missing),
        len(engines),
        [f"DP{e.rank}: {e.describe() if e.state == 'starting' else e.state}" for e in missing],
    )
    status, reason = _status(service, ranks)
    error = None
    if reason is not None:
        code = "engine_dead" if status in ("hung", "dead") else "unavailable"
        error = errors.server_failure(503, f"not ready: {reason}", code).details
    return Readiness(status=status, reason=reason, ranks=ranks, error=error)


def _status(service: Service, ranks: Ranks) -> tuple[Status, str | None]:
    match service.state:
        case "starting":
            if ranks.missing:
                return "loading", f"{ranks.up} of {ranks.all} ranks have loaded the model"
            return "loading", "all ranks have loaded the model; the API server has not"
        case "serving":
            if (limit := service.admission.shedding) is not None:
                return "shedding", service.admission.how_full(limit)
            if not ranks.up:
                return "loading", f"all {ranks.all} ranks are being started anew"
            return "degraded" if ranks.missing else "ready", None
        case "draining":
            return "draining", f"the server is stopping; {service.num_active} requests still run"
        case "hung":
            return "hung", "a rank hangs; the server is stopping"
        case "dead":
            return "dead", "a process that the server needs has died; it is stopping"
        case other:
            assert_never(other)

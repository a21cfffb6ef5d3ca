"""GET and POST /chaos: kill, hang or pause a process of this server, to see that it is survived.

For an administrator: there are no such routes without an administrator's key (`guard`). A run of
faults by a plan is `raywire chaos`; what is done to which process is in `api.chaos`.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from multiprocessing import parent_process
from typing import Annotated

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from api import answer
from api.chaos import KINDS, Kind, Process, choose, processes_below, strike
from api.errors import HttpError
from api.routing import Route
from api.service import Service
from engine.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class ChaosBody(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    """`kill-rank`, …: those that GET lists."""
    draw: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Which of the processes of that role, which are sorted: 0 is the first."""


class Target(msgspec.Struct):
    title: str
    """As `ps` shows it, without `RAYWIRE::`."""
    role: str
    pid: int


class ChaosAnswer(msgspec.Struct):
    kinds: list[str]
    processes: list[Target]
    """Of this server on this node."""
    answered_by: int
    """The pid of the API server that says so: of several any may."""


_BODY = msgspec.json.Decoder(ChaosBody)


def routes(service: Service) -> list[Route]:
    if not service.guard.has_admin:
        return []

    async def show(request: Request) -> Response:
        targets = [_target(each) for each in processes_below(_command_pid()) if each.role]
        return answer.json_response(
            ChaosAnswer([str(kind) for kind in KINDS], targets, os.getpid())
        )

    async def deal(request: Request) -> Response:
        raw = await service.bodies.read(request)
        try:
            asked = _BODY.decode(raw)
            kind = Kind.parse(asked.kind)
        except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
            raise InvalidRequestError(str(error)) from error
        process = _chosen(processes_below(_command_pid()), kind, asked.draw)
        logger.warning("chaos: %s title=%s pid=%d", kind, process.title, process.pid)
        # Answered first: it may be this very process.
        response = answer.json_response(_target(process))
        response.background = BackgroundTask(_strike, process, kind)
        return response

    return [
        Route(("GET",), "/chaos", show, "admin", summary="What can be broken", answer=ChaosAnswer),
        Route(
            ("POST",),
            "/chaos",
            deal,
            "admin",
            summary="Kill, hang or pause a process of this server",
            body=ChaosBody,
            example={"kind": "pause-rank", "draw": 0.0},
            answer=Target,
        ),
    ]


def _chosen(processes: Sequence[Process], kind: Kind, draw: float) -> Process:
    process = choose(list(processes), kind.role, draw)
    if process is None:
        raise HttpError(
            409,
            f"no {kind.role} of this server runs below its command on this node",
            code="no_target",
        )
    if process.pid == _command_pid() and kind.action != "pause":
        raise HttpError(
            409,
            "the only API server is the command itself, so nobody would be left to replace it;"
            " --api-server-count 2 has others",
            code="no_target",
        )
    return process


def _command_pid() -> int:
    """The process from which all of the server's descend: this one, or, of several API servers,
    the one that has started them."""
    parent = parent_process()
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def _target(process: Process) -> Target:
    return Target(process.title, str(process.role), process.pid)


async def _strike(process: Process, kind: Kind) -> None:
    with contextlib.suppress(ProcessLookupError):
        strike(process, kind.action)

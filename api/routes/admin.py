"""What an administrator may do, named as in vLLM: POST /reset_prefix_cache, /start_profile and
/stop_profile.

There are no such routes unless the server has an administrator's key (`--admin-key-file`,
RAYWIRE_ADMIN_KEY). With one, each wants that key, which no key of the API replaces, and no web site
may be in between (`guard`). Whoever adds one here or elsewhere writes
`Route(("POST",), path, endpoint, "admin", …)` and offers it only where `service.guard.has_admin`.

Nothing here takes code, pickles, tensors or paths.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import answer
from api.errors import HttpError
from api.routing import Route
from api.service import Service
from engine.errors import EngineDeadError, RequestFailedError
from engine.utility import NO_PROFILER

logger = logging.getLogger(__name__)

_PROFILE_TIMEOUT_S = 600.0
"""Traces of a long run take minutes to write."""


class ResetAnswer(msgspec.Struct):
    success: bool
    """False: requests were running, whose blocks were not forgotten. Ask again."""


class ProfileAnswer(msgspec.Struct):
    recorded: list[int]
    """Ranks that have written down what they did."""
    not_recorded: list[int]
    """Ranks that were lost meanwhile, and what they had recorded with them."""


def routes(service: Service) -> list[Route]:
    if not service.guard.has_admin:
        return []

    async def reset_prefix_cache(request: Request) -> Response:
        is_reset = all(await service.client.utility("reset_prefix_cache"))
        logger.info("prefix cache reset success=%s", is_reset)
        return answer.json_response(ResetAnswer(is_reset))

    async def start_profile(request: Request) -> Response:
        _check(await _profile(service, is_start=True), is_start=True)
        return Response()

    async def stop_profile(request: Request) -> Response:
        epochs = [engine.epoch for engine in service.client.engines]
        ends = await _profile(service, is_start=False)
        recorded = [rank for rank, end in ends.items() if end is None]
        if recorded:
            gone = [e.rank for e in service.client.engines if e.epoch != epochs[e.index]]
            ends = {
                rank: end for rank, end in ends.items() if not (rank in gone or _knows_of_none(end))
            }
        _check(ends, is_start=False)
        missing = [rank for rank in service.ranks if rank not in recorded]
        if missing:
            logger.warning("no profile of ranks=%s: they were lost meanwhile", missing)
        return answer.json_response(ProfileAnswer(recorded, missing))

    table = [
        Route(
            ("POST",),
            "/reset_prefix_cache",
            reset_prefix_cache,
            "admin",
            summary="Forget all cached prefixes",
            answer=ResetAnswer,
        )
    ]
    if service.config.profile_dir is not None:
        table += [
            Route(
                ("POST",),
                "/start_profile",
                start_profile,
                "admin",
                summary="Record what each worker does",
            ),
            Route(
                ("POST",),
                "/stop_profile",
                stop_profile,
                "admin",
                summary="Write down what was recorded since /start_profile",
                answer=ProfileAnswer,
            ),
        ]
    return table


async def _profile(service: Service, *, is_start: bool) -> dict[int, BaseException | None]:
    """Of all ranks, each into a folder of its own, by names that all API servers know.

    Returns:
        Of each rank that was asked: why it could not.
    """
    assert service.config.profile_dir is not None
    folder = Path(service.config.profile_dir)
    calls = {
        rank: service.client.utility(
            "profile",
            is_start,
            str(folder / f"dp{rank}"),
            engine_index=index,
            timeout_s=_PROFILE_TIMEOUT_S,
        )
        for index, rank in enumerate(service.ranks)
        if service.client.engines[index].state != "lost"
    }
    ends = await asyncio.gather(*calls.values(), return_exceptions=True)
    logger.info("profile is_start=%s folder=%s", is_start, folder)
    return {
        rank: end if isinstance(end, BaseException) else None
        for rank, end in zip(calls, ends, strict=True)
    }


def _knows_of_none(end: BaseException | None) -> bool:
    """Whether a rank has nothing to write down: it was started anew since, or cannot be reached."""
    return isinstance(end, EngineDeadError) or NO_PROFILER in str(end)


def _check(ends: Mapping[int, BaseException | None], *, is_start: bool) -> None:
    failures = [end for end in ends.values() if end is not None]
    for failure in failures:
        logger.error("profile is_start=%s: %s", is_start, failure)
    if any(isinstance(failure, RequestFailedError) for failure in failures):
        state = "runs already, or cannot be started" if is_start else "does not run, or failed"
        raise HttpError(409, f"the profiler {state}; the log says more", code="profile_failed")
    if failures:
        raise failures[0]

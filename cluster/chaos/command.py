"""Carries a plan of faults out on a running server: what `raywire chaos` does."""

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import click
import msgspec

from api.chaos import PAUSE_S
from cluster.api_client import error_message, reason
from cluster.chaos.plan import Fault
from cluster.server_url import server_url
from engine.errors import ConfigError

_POLL_S = 0.1
_ANSWER_S = 5.0
_NOTICED_S = 15.0
"""A process that hangs is silent for 10 s before anybody takes it for dead."""


class _Target(msgspec.Struct, frozen=True):
    title: str
    role: str
    pid: int


class _Targets(msgspec.Struct):
    processes: list[_Target]
    answered_by: int


class _Ranks(msgspec.Struct):
    up: int
    all: int


class _Ready(msgspec.Struct):
    ranks: _Ranks


def run_chaos(url: str, admin_key: str | None, plan: Sequence[Fault], patience_s: float) -> bool:
    """Deal each fault at its time, and wait until the server is as before.

    Returns:
        Whether it has been so after each.

    Raises:
        ConfigError: there is no such server, or it lets nobody break it.
    """
    return asyncio.run(_run(server_url(url).removesuffix("/v1"), admin_key, plan, patience_s))


async def _run(url: str, admin_key: str | None, plan: Sequence[Fault], patience_s: float) -> bool:
    headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    # No connection is used twice: it may be that of an API server which has gone.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        victim = _Victim(session, url)
        await victim.processes()
        return await _deal_all(victim, plan, patience_s)


async def _deal_all(victim: "_Victim", plan: Sequence[Fault], patience_s: float) -> bool:
    began_s, num_survived = time.monotonic(), 0
    for fault in plan:
        await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
        before = await victim.processes()
        at_s = time.monotonic()
        target = await victim.deal(fault)
        if target is None:
            continue
        back_s = await victim.wait_whole(before, target, fault, patience_s)
        click.echo(
            f"{at_s - began_s:7.1f} s  {fault.kind} {target.title} pid={target.pid}: "
            + (
                f"not as before after {patience_s:.0f} s"
                if back_s is None
                else f"as before after {back_s - at_s:.1f} s"
            )
        )
        if back_s is None:
            return False
        num_survived += 1
    click.echo(f"survived {num_survived} fault{'' if num_survived == 1 else 's'}")
    return True


class _Victim:
    """The server, as an administrator sees it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def processes(self) -> list[_Target]:
        """Those that a fault may meet.

        Raises:
            ConfigError: it does not say.
        """
        try:
            return (await self._targets()).processes
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"no server of ours at {self._url}: {reason(error)}") from error

    async def _targets(self) -> _Targets:
        async with self._session.get(f"{self._url}/chaos") as response:
            content = await response.read()
        if response.status == 401:
            raise ConfigError(
                f"{self._url} lets only its administrator break it: give the key of its"
                " RAYWIRE_ADMIN_KEY or --admin-key-file, by RAYWIRE_ADMIN_KEY or --admin-key"
            )
        if response.status == 404:
            raise ConfigError(
                f"{self._url} lets nobody break it: start it with an administrator's key"
                " (RAYWIRE_ADMIN_KEY)"
            )
        if response.status != 200:
            raise ConfigError(f"{self._url}/chaos: {error_message(response.status, content)}")
        return msgspec.json.decode(content, type=_Targets)

    async def deal(self, fault: Fault) -> _Target | None:
        """Whom it has met; None where there is nobody of that role."""
        body = {"kind": str(fault.kind), "draw": fault.draw}
        try:
            async with self._session.post(f"{self._url}/chaos", json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(f"{self._url} does not answer: {reason(error)}") from error
        if response.status == 409:
            click.echo(f"{fault}: left out; {error_message(409, content)}")
            return None
        if response.status != 200:
            raise ConfigError(f"{self._url}/chaos: {error_message(response.status, content)}")
        return msgspec.json.decode(content, type=_Target)

    async def wait_whole(
        self, before: Sequence[_Target], target: _Target, fault: Fault, patience_s: float
    ) -> float | None:
        """When all processes are there again and the server is ready; None if they do not come."""
        known = {each.pid for each in before}
        wanted = sorted(each.title for each in before)
        is_paused = fault.kind.action == "pause"
        # A process shows long before it serves: a new API server has to have answered.
        has_answered = is_paused or fault.kind.role != "api-server"
        patience_s += _NOTICED_S * (fault.kind.action == "hang")
        began_s = time.monotonic()
        if is_paused:
            await asyncio.sleep(PAUSE_S)
        while time.monotonic() - began_s < patience_s:
            try:
                now = await self._targets()
                is_ready = await self._is_ready()
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError, ConfigError):
                is_ready = False
            if is_ready:
                has_answered = has_answered or now.answered_by not in known
                is_back = is_paused or target not in now.processes
                if has_answered and is_back and sorted(p.title for p in now.processes) == wanted:
                    return time.monotonic()
            await asyncio.sleep(_POLL_S)
        return None

    async def _is_ready(self) -> bool:
        """Whether all ranks are up."""
        async with self._session.get(f"{self._url}/ready") as response:
            ranks = msgspec.json.decode(await response.read(), type=_Ready).ranks
            return response.status == 200 and ranks.up == ranks.all

"""What `raywire run-batch` does, in this order:

1. read the output of earlier runs, and mend its end      (result_file)
2. read the input: is it sound, and how much is left      (request_file)
3. start a server, or find the one that is named          (server_process)
4. send what is left, append each result as it comes      (runner)
5. end the server, say what has come of it                (progress)
"""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import click
import uvloop

from cluster.api_client import ApiClient
from cluster.batch import request_file, result_file
from cluster.batch.lines import Line, Result, encode
from cluster.batch.progress import Progress
from cluster.batch.runner import BatchRunner, ServerGoneError
from cluster.batch.server_process import OwnServer, ServerEndedError, own_server
from cluster.config import ServeConfig
from engine.errors import EXIT_FAILED, ConfigError
from engine.lifecycle import is_hangup_ignored

EXIT_SOME_FAILED = 3
"""Everything has a result, and not every one is a success."""

_SPARE = 1.25
"""Requests under way for each that the engines take: where one ends, another one waits."""
_CONCURRENCY_ELSEWHERE = 256
_OTHER_FILES = 128
"""File descriptors beside those of the connections."""

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedServer:
    """A running server to which the batch goes."""

    url: str
    api_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The flags of the command."""

    input_file: str
    output_file: str
    server: NamedServer | ServeConfig
    """One that runs, or one to be started."""
    max_concurrency: int | None

    @property
    def concurrency(self) -> int:
        """Requests under way at most."""
        if self.max_concurrency is not None:
            return self.max_concurrency
        if isinstance(self.server, NamedServer):
            return _CONCURRENCY_ELSEWHERE
        engine = self.server.engine
        return int(_SPARE * engine.max_num_seqs * engine.data_parallel_size)


def run_batch(settings: BatchSettings) -> int:
    """Run a batch, or what is left of it. Main thread only.

    Returns:
        The exit code: 0 all requests succeeded, `EXIT_SOME_FAILED` all have a result, 1 the server
        or the output failed and some have none, 128 plus the number of the signal that stopped us.

    Raises:
        ConfigError: the files, the settings or the server cannot work; nothing has been sent.
    """
    _check_different(settings.input_file, settings.output_file)
    with (
        request_file.opened(settings.input_file) as source,
        result_file.opened(settings.output_file) as output,
    ):
        counts = request_file.check(source, output.done)
        lines = request_file.pending(source, output.done)
        progress = Progress(counts)

        def record(result: Result) -> None:
            output.write(encode(result))
            progress.add(result)

        concurrency = _allowed_concurrency(min(settings.concurrency, counts.pending))
        try:
            if counts.pending:
                _run_until_signal(_send(settings.server, lines, record, progress, concurrency))
        except ServerEndedError as error:
            if not progress.has_begun:
                return error.exit_code or EXIT_FAILED  # it has said why
            progress.say(str(error))
            return EXIT_FAILED
        except (ServerGoneError, OSError) as error:
            progress.say(str(error))
            return EXIT_FAILED
        except _Stopped as stopped:
            progress.say()
            return 128 + stopped.signum
        finally:
            progress.close()
            output.sync()
        progress.say()
        return EXIT_SOME_FAILED if progress.has_failures else 0


def _check_different(input_file: str, output_file: str) -> None:
    try:
        is_same = input_file != "-" and os.path.samefile(input_file, output_file)
    except OSError:
        return  # there is none yet
    if is_same:
        raise ConfigError(f"input and output are the same file: {input_file}")


def _allowed_concurrency(wanted: int) -> int:
    """As many connections as this process, and the server which inherits that, may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - _OTHER_FILES)
    return wanted


# ------------------------------------------------------------------------------------- the server


async def _send(
    server: NamedServer | ServeConfig,
    lines: Iterator[Line],
    record: Callable[[Result], None],
    progress: Progress,
    concurrency: int,
) -> None:
    async with _ready(server, concurrency) as (client, unless_ended):
        progress.begin()
        await unless_ended(BatchRunner(client, record).run(lines, concurrency))


_Work = Coroutine[object, object, None]


@asynccontextmanager
async def _ready(
    server: NamedServer | ServeConfig, max_connections: int
) -> AsyncIterator[tuple[ApiClient, Callable[[_Work], _Work]]]:
    """Yields the client of a server that is ready, and what runs work for as long as it is there.

    Raises:
        ConfigError: no server answers at the URL.
        ServerEndedError: the server that was started has ended.
    """
    if isinstance(server, NamedServer):
        async with _connected(server.url, server.api_key, max_connections) as client:
            await client.first_model()
            yield client, lambda work: work
        return
    click.echo(f"loading {server.engine.model}", err=True)
    async with own_server(server) as own:
        async with _connected(own.url, own.api_key, max_connections) as client:
            await _unless_ended(own, _until_ready(client))
            yield client, lambda work: _unless_ended(own, work)


@asynccontextmanager
async def _connected(
    url: str, api_key: str | None, max_connections: int
) -> AsyncIterator[ApiClient]:
    client = ApiClient(url, api_key, max_connections)
    try:
        yield client
    finally:
        await client.close()


async def _until_ready(client: ApiClient) -> None:
    while not await client.is_ready():  # noqa: ASYNC110  # it is another process
        await asyncio.sleep(_POLL_S)


async def _unless_ended(server: OwnServer, work: _Work) -> None:
    """Do `work`, or raise ServerEndedError if the server ends before it is done."""
    job, end = asyncio.ensure_future(work), asyncio.ensure_future(server.end())
    try:
        await asyncio.wait({job, end}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ServerEndedError(end.result())
        job.result()
    finally:
        job.cancel()
        end.cancel()
        await asyncio.gather(job, end, return_exceptions=True)


# ---------------------------------------------------------------------------------------- signals


class _Stopped(Exception):
    """A signal has come, and everything has ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _run_until_signal(work: _Work) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_cancelled_by_signals(work))


async def _cancelled_by_signals(work: _Work) -> None:
    """Await `work`; the first SIGINT, SIGTERM or SIGHUP cancels it, further ones change nothing."""
    task = asyncio.ensure_future(work)
    came: list[int] = []

    def stop(signum: int) -> None:
        came.append(signum)
        if len(came) == 1:
            task.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if not is_hangup_ignored(signum):
            loop.add_signal_handler(signum, stop, signum)
    try:
        await task
    except asyncio.CancelledError:
        if came:
            raise _Stopped(came[0]) from None
        raise

"""What a batch has come to: counted, shown in a progress bar, and said in one line at the end."""

import sys
import time

import click
import msgspec
from tqdm import tqdm

from cluster.batch.lines import Result
from cluster.batch.request_file import Counts

_TERMINAL_S, _LOG_S = 0.2, 30.0
"""How often the bar is drawn at most: on a terminal, and where each time is one more line."""


class Progress:
    """Standard error, for as long as a batch runs.

    Args:
        counts: of the input, with the results of earlier runs.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._succeeded = counts.succeeded
        self._failed = counts.failed
        self._num_tokens = 0
        self._began_s = time.monotonic()
        self._bar: tqdm | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a server."""
        return self._bar is not None

    @property
    def has_failures(self) -> bool:
        """In this run or an earlier one."""
        return self._failed > 0

    def begin(self) -> None:
        """The server is ready."""
        self._began_s = time.monotonic()
        self._bar = tqdm(
            total=self._counts.total,
            initial=self._counts.total - self._counts.pending,
            unit="req",
            dynamic_ncols=True,
            mininterval=_TERMINAL_S if sys.stderr.isatty() else _LOG_S,
        )

    def add(self, result: Result) -> None:
        assert self._bar is not None, "results come after `begin`"
        self._num_tokens += _output_tokens(result)
        if result.is_success:
            self._succeeded += 1
        else:
            self._failed += 1
            self._bar.set_postfix(failed=self._failed, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is. Idempotent."""
        if self._bar is not None:
            self._bar.close()

    def report(self) -> str:
        """All of it in a line."""
        counts = self._counts
        before = counts.total - counts.pending
        parts = [f"{self._succeeded} succeeded", f"{self._failed} failed"]
        if missing := counts.total - self._succeeded - self._failed:
            parts.append(f"{missing} have no result yet: run the same command again")
        if before:
            parts.append(f"{before} were there before")
        if self._num_tokens:
            rate = self._num_tokens / (time.monotonic() - self._began_s)
            parts.append(f"{self._num_tokens} output tokens, {rate:.0f}/s")
        return f"{counts.total} requests: {'; '.join(parts)}"

    def say(self, problem: str | None = None) -> None:
        """Report, below the bar."""
        self.close()
        if problem is not None:
            click.echo(f"error: {problem}", err=True)
        click.echo(self.report(), err=True)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


def _output_tokens(result: Result) -> int:
    """As the server counts them; 0 where it does not."""
    try:
        body = b"{}" if result.response is None else result.response.body
        usage = msgspec.json.decode(body, type=_Body).usage
    except msgspec.MsgspecError:
        return 0
    return 0 if usage is None else usage.completion_tokens

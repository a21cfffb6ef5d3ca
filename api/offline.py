"""A batch of prompts run to its end, and the results as the user of `LLM` gets them.

`llm` makes the jobs in the caller's thread, `Batch.run` is on the event loop's, and `show_progress`
waits in the caller's again. Nobody reads a stream as it comes here, so one task serves all of them:
each stream notes that it has news, and the task takes what has gathered.
"""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from api.engine_client import EngineClient
from api.output_processor import OutputDelta, OutputProcessor, PositionLogprobs
from api.request_stream import RequestStream, Wakeup
from api.sampling import SamplingParams
from api.timeline import Timeline
from api.tokenizer import Tokenizer
from engine.errors import RequestError
from engine.wire import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position, keyed by its id."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over the generated tokens, if log probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort", "error" or "repetition"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end token."""
    error: str | None = None
    """What failed, with the finish reason "error"."""
    timeline: Timeline | None = None
    """Seconds spent waiting, in prefill and in decode, by the engine core's clock."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its continuations."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry for each prompt token, None for the first, if asked for."""
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)


class RunningSequence:
    """One continuation on its way: collects what comes."""

    __slots__ = ("_pieces", "job", "output", "processor", "request", "stream")

    def __init__(self, job: "Job", index: int, request: EngineCoreRequest) -> None:
        self.job = job
        self.request = request
        self.output = CompletionOutput(index)
        self.processor = OutputProcessor(job.tokenizer, job.params, job.prompt_token_ids)
        self.stream: RequestStream | None = None
        self._pieces: list[str] = []
        """Of the text, joined at the end: to append to a text is to copy it."""

    def start(self, client: EngineClient, wakeup: Wakeup) -> None:
        """Send the request."""
        self.stream = client.stream(self.request, wakeup=wakeup)
        self.output.timeline = self.stream.timeline

    def take(self) -> bool:
        """Take in all that has come; whether that ended it.

        Raises:
            EngineDeadError: nothing more will come.
            RequestError: the engine has refused the request.
        """
        # Until there is nothing: an error waits behind the outputs that came before it.
        while self.stream is not None and (output := self.stream.take()) is not None:
            delta = self.processor.push(output)
            if delta is not None:
                if isinstance(delta.failure, RequestError):
                    raise delta.failure
                self._add(delta)
                if delta.finish_reason is not None:
                    return True
        return False

    def close(self) -> None:
        """Abort it, unless it has ended by itself. Idempotent."""
        if self.stream is not None:
            self.stream.close()

    def _add(self, delta: OutputDelta) -> None:
        output = self.output
        self._pieces.append(delta.text)
        output.token_ids += delta.token_ids
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.error = str(delta.failure) if delta.failure is not None else None
        if delta.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += [_by_id(position) for position in delta.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                position.chosen.logprob for position in delta.logprobs
            )
        if delta.prompt_logprobs is not None:
            self.job.prompt_logprobs += [_by_id(p) for p in delta.prompt_logprobs]
        if delta.finish_reason is not None:
            output.text = "".join(self._pieces)


@dataclass(slots=True)
class Job:
    """One prompt on its way."""

    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[EngineCoreRequest]
    params: SamplingParams
    tokenizer: Tokenizer
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    sequences: list[RunningSequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [RunningSequence(self, i, r) for i, r in enumerate(self.requests)]

    def result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.requests[0].request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=(
                self.prompt_logprobs[: len(self.prompt_token_ids)]
                if self.params.prompt_logprobs is not None
                else None
            ),
            outputs=[sequence.output for sequence in self.sequences],
            num_cached_tokens=self.sequences[0].processor.num_cached_tokens,
        )


def _by_id(position: PositionLogprobs) -> dict[int, Logprob]:
    return {
        entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)
        for entry in (*position.top, position.chosen)
    }


DoneQueue = queue.SimpleQueue[Job | None]
"""Jobs that are done, then None."""


class _Bell(Wakeup):
    """Rung by one stream: notes which sequence has news, and wakes the one task for all of them."""

    __slots__ = ("_news", "_sequence", "_task_bell")

    def __init__(
        self, sequence: RunningSequence, news: set[RunningSequence], task_bell: Wakeup
    ) -> None:
        super().__init__()
        self._sequence = sequence
        self._news = news
        self._task_bell = task_bell

    def set(self) -> None:
        self._news.add(self._sequence)
        self._task_bell.set()


class Batch:
    """Jobs that run together."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.done: DoneQueue = queue.SimpleQueue()
        self._sequences = [sequence for job in jobs for sequence in job.sequences]
        self._news: set[RunningSequence] = set()
        self._bell = Wakeup()
        self._is_cancelled = False

    async def run(self, client: EngineClient) -> None:
        """Send all requests and take in their outputs; a job goes to `done` when its last one came,
        and None at the end.

        Raises:
            EngineDeadError: the engine core is gone.
            RequestError: the engine has refused one of them; the others are aborted.
        """
        try:
            for sequence in () if self._is_cancelled else self._sequences:
                sequence.start(client, _Bell(sequence, self._news, self._bell))
            num_left = len(self._sequences)
            while num_left and not self._is_cancelled:
                num_left -= self._take_news()
                if num_left:
                    await self._bell.wait()
        finally:
            for sequence in self._sequences:
                sequence.close()
            self.done.put(None)

    def cancel(self) -> None:
        """Abort what still runs. On the event loop's thread, before or while `run` is under way."""
        self._is_cancelled = True
        self._bell.set()

    def _take_news(self) -> int:
        """Let all sequences with news take them in; how many have ended."""
        num_ended = 0
        while self._news:
            sequence = self._news.pop()
            if not sequence.output.finished() and sequence.take():
                sequence.close()  # where a stop string cut it short, the engine does not know yet
                num_ended += 1
                if all(s.output.finished() for s in sequence.job.sequences):
                    self.done.put(sequence.job)
        return num_ended


def show_progress(done: DoneQueue, num_jobs: int, *, is_shown: bool) -> None:
    """Wait until all jobs are done, or have failed, with a bar that counts them."""
    began = time.monotonic()
    num_prompt_tokens = num_output_tokens = 0
    with _ProgressBar(
        total=num_jobs, desc="Processed prompts", disable=not is_shown, dynamic_ncols=True
    ) as bar:
        while (job := done.get()) is not None:
            num_prompt_tokens += len(job.prompt_token_ids)
            num_output_tokens += sum(len(s.output.token_ids) for s in job.sequences)
            passed_s = time.monotonic() - began
            bar.postfix = (
                f"input: {num_prompt_tokens / passed_s:.1f} toks/s,"
                f" output: {num_output_tokens / passed_s:.1f} toks/s"
            )
            bar.update()


class _ProgressBar(tqdm):  # type: ignore[misc]  # tqdm is untyped
    # tqdm's monitor is a thread that stays: it would turn the next LLM's fork into a spawn.
    monitor_interval = 0

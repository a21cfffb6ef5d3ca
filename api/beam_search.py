"""Beam search on top of the engine: each step asks it for one token behind each beam.

    beams --> engine requests of one token --> log probabilities --> beams, one token longer ...

Used by `answer` in place of a plain `Generation`, where a request says `use_beam_search`. Which
beams go on is `beams`' business. The engine knows of no search: it gets prompts that have most of
their blocks in the prefix cache, and all beams of a prompt go to the rank of the first. The answers
of one prompt come all at once, when its search is over.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from api.beams import Beam, BeamSet, joined_logprobs
from api.generate import Batch, Choice, Generation, Prompt
from api.load_balancer import Route
from api.metrics import RequestRecord
from api.output_processor import OutputDelta, OutputProcessor
from api.request_stream import RequestStream
from api.route_headers import RouteWish
from api.sampling import SamplingParams
from api.service import Service
from api.timeline import Timeline
from engine.errors import RequestFailedError, ServerError
from engine.sampling_params import SamplingParams as EngineSamplingParams
from engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprobs,
    OutputDetails,
    PrefillStats,
)


class BeamSearch(Generation):
    """The best continuations of each prompt of one request.

    Args:
        params: of the request; `n` is the number of beams.
        length_penalty: above 0 longer answers score higher.
    """

    def __init__(self, params: SamplingParams, length_penalty: float) -> None:
        super().__init__()
        self._params = params
        self._length_penalty = length_penalty
        self._searches: list[_Search] = []
        """Those that go on."""
        self._num_prompts = 0

    @property
    def num_choices(self) -> int:
        return self._num_prompts * self._n

    async def launch(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        processors: Iterable[OutputProcessor],
        arrived_at: float,
        wish: RouteWish,
    ) -> None:
        """Begin a search for each prompt. Of its requests, which are alike, one is sent at a time
        for each beam."""
        self._n = self._params.n
        rest = iter(processors)
        for number, prompt in enumerate(prompts):
            search = _Search(
                service,
                self,
                prompt,
                [next(rest) for _ in prompt.requests],
                number * self._n,
                service.metrics.record(arrived_at),
            )
            self._searches.append(search)
            self._num_prompts += 1
            search.begin(self._params, self._length_penalty, wish)
            self.routes.append(search.route)
            service.metrics.on_route(search.route)

    @property
    def is_over(self) -> bool:
        return self._is_cancelled or not (self._searches or self._failure)

    def _take(self) -> Batch:
        """The answers to the prompts whose search is over."""
        batch: list[tuple[Choice, OutputDelta]] = []
        try:
            for search in self._searches:
                if search.advance():
                    batch += search.results()
        except ServerError as error:
            self._failure = error
            self.close("error")
            self._searches = []
            return batch
        if batch:
            self._searches = [each for each in self._searches if not each.is_over]
            self.choices = sorted([*self.choices, *(c for c, _ in batch)], key=_index)
        return batch

    def close(self, reason: str = "abort") -> None:
        super().close(reason)
        for search in self._searches:
            search.close(reason)


def _index(choice: Choice) -> int:
    return choice.index


class _Search:
    """The search for the best continuations of one prompt.

    Args:
        service: with the engine client.
        owner: is woken up when there is news.
        prompt: with a request for each beam.
        processors: one for each answer.
        first_index: of its choices.
        record: of the whole search.
    """

    route: Route

    def __init__(
        self,
        service: Service,
        owner: Generation,
        prompt: Prompt,
        processors: list[OutputProcessor],
        first_index: int,
        record: RequestRecord,
    ) -> None:
        self.is_over = False
        self._service = service
        self._owner = owner
        self._template = prompt.requests[0]
        self._processors = processors
        self._first_index = first_index
        self._record = record
        self._prefill: PrefillStats | None = None
        self._num_steps = 0
        self._streams: list[RequestStream] = []
        """Of the step under way: one for each beam that is alive."""
        self._rows: dict[RequestStream, Logprobs] = {}
        """What has come of it."""

    def begin(self, params: SamplingParams, length_penalty: float, wish: RouteWish) -> None:
        """Send the first step."""
        template = self._template.sampling_params
        prompt = self._template.prompt_token_ids
        assert template is not None
        assert prompt is not None
        self._num_logprobs = params.logprobs or 0
        self._beams = BeamSet(
            params.n,
            template.max_tokens or 1,
            len(prompt),
            length_penalty,
            () if params.ignore_eos else template.eos_token_ids,
            params.stop_token_ids,
        )
        self._step_params = EngineSamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=max(2 * params.n, self._num_logprobs),
        )
        first = self._request(self._beams.alive[0], 0)
        first = msgspec.structs.replace(first, data_parallel_rank=wish.pinned_rank)
        stream = self._service.client.stream(
            first, wakeup=self._owner.wakeup, timeline=self._record, session=wish.session
        )
        self.route = stream.route
        self._record.wait_for_prefill(len(prompt))
        self._streams = [stream]

    def advance(self) -> bool:
        """Take in what has come; send the next step if this one is complete.

        Returns:
            Whether the search is over now.

        Raises:
            EngineDeadError, RequestFailedError, UnavailableError: it cannot go on.
        """
        is_aborted = False
        for stream in self._streams:
            while (output := stream.take()) is not None:
                is_aborted |= self._read(stream, output)
        if is_aborted:
            self._beams.end(FinishReason.ABORT)
        elif len(self._rows) == len(self._streams):
            self._beams.advance([self._rows[stream] for stream in self._streams])
        else:
            return False
        self._rows = {}
        self._streams = []
        self._send_step()
        self.is_over = not self._streams
        return self.is_over

    def results(self) -> Iterator[tuple[Choice, OutputDelta]]:
        """The best continuations, when the search is over."""
        beams = self._beams.best()
        for number, (beam, processor) in enumerate(zip(beams, self._processors, strict=False)):
            stream = RequestStream(self._template.request_id, _nothing_runs)
            record = (
                self._record
                if number == 0
                else self._service.metrics.record(self._record.arrived_at)
            )
            choice = Choice(self._first_index + number, processor, stream, record)
            delta = processor.push(self._output(beam))
            assert delta is not None
            choice.end(delta.finish_reason or "stop")
            yield choice, delta

    def close(self, reason: str) -> None:
        """Abort what runs."""
        for stream in self._streams:
            stream.close()
        first = self._processors[0]
        self._record.finish(
            reason, num_prompt_tokens=first.num_prompt_tokens, num_output_tokens=self._num_steps
        )

    def _read(self, stream: RequestStream, output: EngineCoreOutput) -> bool:
        """Keep what is of use. Returns whether the request was aborted."""
        details = output.details
        if output.finish_reason is FinishReason.ERROR:
            cause = details.error if details is not None else None
            raise RequestFailedError(cause or "the engine failed on this request")
        if details is not None:
            self._prefill = self._prefill or details.prefill_stats
            if details.new_logprobs is not None:
                self._rows[stream] = details.new_logprobs
        return output.finish_reason is FinishReason.ABORT

    def _send_step(self) -> None:
        self._num_steps += 1
        for number, beam in enumerate(self._beams.alive):
            stream = self._service.client.stream(
                self._request(beam, number),
                wakeup=self._owner.wakeup,
                timeline=Timeline(),
                follows=self.route,
            )
            self._streams.append(stream)

    def _request(self, beam: Beam, number: int) -> EngineCoreRequest:
        """The request for the token behind a beam."""
        prompt = self._template.prompt_token_ids
        assert prompt is not None
        return msgspec.structs.replace(
            self._template,
            request_id=f"{self._template.request_id}-{self._num_steps}-{number}",
            prompt_token_ids=np.concatenate([prompt, np.frombuffer(beam.tokens, "<u4")]),
            sampling_params=self._step_params,
        )

    def _output(self, beam: Beam) -> EngineCoreOutput:
        """A beam as if the engine had sampled it in one long step."""
        return EngineCoreOutput(
            self._template.request_id,
            beam.tokens,
            beam.finish_reason,
            beam.stop_reason,
            OutputDetails(
                new_logprobs=joined_logprobs(beam, self._num_logprobs),
                prefill_stats=self._prefill,
            ),
        )


def _nothing_runs(request_id: str) -> None:
    """What closing the stream of an answer does: its requests have ended."""

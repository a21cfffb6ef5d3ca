"""One request that has no last output so far: whose it is, and what it needs to go on elsewhere.
Pure. Kept by `dispatcher`.

A rank that dies takes along what it has computed, but not what it has sent: prompt, parameters and
tokens are here. Another rank computes the keys and values of all of them anew, as after a
preemption, and continues behind the last token that came. Seeds, penalties, grammars, `min_tokens`
and `max_tokens` count the tokens that it is given as output (`EngineCoreRequest.output_token_ids`),
so the stream's reader sees nothing but a pause.
"""

import msgspec
import numpy as np

from api.engine_handle import EngineHandle
from api.load_balancer import Route
from api.request_stream import RequestStream
from engine.wire import EngineCoreOutput, EngineCoreRequest, OutputDetails

MAX_FRUITLESS_MOVES = 3
"""So many ranks in a row may die with a request that gets no token from any of them. Then it is
probably what they die of."""


class InFlight:
    """A request, the stream of its outputs, and the rank that has it."""

    __slots__ = (
        *("_has_prefill_stats", "_has_prompt_logprobs", "_token_bytes"),
        *("engine", "num_fruitless_moves", "request", "session", "stream"),
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        stream: RequestStream,
        engine: EngineHandle,
        session: str | None = None,
    ) -> None:
        self.request = request
        """As it was first sent."""
        self.stream = stream
        self.engine: EngineHandle | None = engine
        """None while it waits for a rank to be back."""
        self.session = session
        self.num_fruitless_moves = 0
        self._token_bytes = bytearray()
        self._has_prompt_logprobs = False
        self._has_prefill_stats = False

    def note(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Remember what an output brings. Returns what of it is news to the reader: another rank
        tells again what the first one has found of the prompt."""
        if output.new_token_ids:
            self._token_bytes += output.new_token_ids
            self.num_fruitless_moves = 0
        details = output.details
        if details is None:
            return output
        if details.prompt_logprobs is not None or details.prefill_stats is not None:
            output = self._without_known(output, details)
        return output

    def leave(self) -> None:
        """Its rank is gone: it has none until `move`."""
        self.engine = None
        self.num_fruitless_moves += 1
        self.stream.timeline.leave()

    def move(self, engine: EngineHandle, route: Route) -> None:
        """`engine` has it now."""
        self.engine = engine
        self.stream.route = route
        self.stream.timeline.engine_index = engine.index

    def resumed(self) -> EngineCoreRequest:
        """What another rank needs to go on with it. Whatever rank its client has asked for, any
        will do now."""
        request, params = self.request, self.request.sampling_params
        if self._has_prompt_logprobs and params is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            sampling_params=params,
            data_parallel_rank=None,
            output_token_ids=self._output_token_ids(),
        )

    def _output_token_ids(self) -> "np.ndarray | None":
        new = np.frombuffer(bytes(self._token_bytes), dtype="<u4")
        given = self.request.output_token_ids
        if given is None:
            return new if new.size else None
        return np.concatenate([given, new])

    def _without_known(self, output: EngineCoreOutput, details: OutputDetails) -> EngineCoreOutput:
        known: dict[str, None] = {}
        if details.prompt_logprobs is not None:
            known |= {"prompt_logprobs": None} if self._has_prompt_logprobs else {}
            self._has_prompt_logprobs = True
        if details.prefill_stats is not None:
            known |= {"prefill_stats": None} if self._has_prefill_stats else {}
            self._has_prefill_stats = True
        if not known:
            return output
        details = msgspec.structs.replace(details, **known)
        return msgspec.structs.replace(output, details=details)

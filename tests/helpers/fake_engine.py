"""The engine core's side of wire 1 on real ZeroMQ sockets, in a thread, with computed answers.

For tests of the API server that must be quick: no model, no scheduler, no process. Each step every
request in flight gets the next token of its answer, all in one message, as from a real core.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from engine import codec, utility
from engine.bound import ServerWires
from engine.curve import CurveKeys, CurveLink, make_client
from engine.errors import RequestFailedError
from engine.sockets import allow_ipv6, make_socket
from engine.step import WorkerStats
from engine.utility import NO_PROFILER
from engine.wire import (
    PROTOCOL_VERSION,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    EventKind,
    Fence,
    Fingerprint,
    FinishReason,
    Heartbeat,
    Logprobs,
    OutputDetails,
    OutputType,
    Phase,
    PrefillStats,
    RequestType,
    SchedulerStats,
    UtilityCall,
    pack_identity,
)
from tests.helpers.byte_folder import END, VOCAB_SIZE

Answer = Callable[[EngineCoreRequest], Iterable[int | FinishReason]]
"""The tokens of one request; a finish reason, or running out of tokens, ends it."""

FINGERPRINT = Fingerprint(PROTOCOL_VERSION, "code", {"torch": "2.13"}, "model", "tokenizer")


def prompt_as_answer(request: EngineCoreRequest) -> Iterator[int]:
    """Token i of the answer is token i of the prompt; then the end token."""
    assert request.prompt_token_ids is not None
    yield from request.prompt_token_ids.tolist()
    yield END


def text_as_answer(text: str) -> Answer:
    """Always the same text, a byte each step, then the end token."""
    return lambda request: [*text.encode(), END]


def endless_answer(request: EngineCoreRequest) -> Iterator[int]:
    """`abc…zabc…`, for ever."""
    return itertools.cycle(range(ord("a"), ord("z") + 1))


class FakeEngine:
    """One engine core. A context manager; attributes may be changed while it runs."""

    def __init__(
        self,
        wires: ServerWires,
        answer: Answer = prompt_as_answer,
        *,
        index: int = 0,
        epoch: int = 0,
        max_model_len: int = 1000,
        fingerprint: Fingerprint = FINGERPRINT,
        step_s: float = 0.0,
        is_ready: bool = True,
        num_cached_tokens: int = 0,
        keys: CurveKeys | None = None,
    ) -> None:
        self.answer = answer
        self.step_s = step_s
        """How long a step takes."""
        self.is_paused = False
        """No steps: requests stay where they are."""
        self.answers_calls = True
        self.is_silent = False
        """No heartbeats."""
        self.heartbeat_age_ms = 0
        self.num_cached_tokens = num_cached_tokens
        self.is_profiling = False
        self.received: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[UtilityCall] = []
        self.fences: list[Fence] = []
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.running: dict[str, Iterator[int | FinishReason]] = {}
        self.failure: BaseException | None = None
        self.index, self.epoch = index, epoch
        self._wires = wires
        self._keys = keys
        self._ready = EngineReady(
            engine_index=index,
            epoch=epoch,
            max_model_len=max_model_len,
            num_gpu_blocks=64,
            block_size=16,
            kv_cache_size_tokens=1024,
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_num_seqs=256,
            fingerprint=fingerprint,
        )
        self._may_be_ready = threading.Event()
        if is_ready:
            self._may_be_ready.set()
        self._last_words: str | None = None
        self._is_ending = threading.Event()
        self._encoder = codec.Encoder()
        self._requests: dict[str, EngineCoreRequest] = {}
        self._num_outputs: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.vanish()
        if self.failure is not None:
            raise self.failure

    def become_ready(self) -> None:
        self._may_be_ready.set()

    def die(self, cause: str) -> None:
        """End with last words, as after an exception."""
        self._last_words = cause
        self.vanish()

    def vanish(self) -> None:
        """End without a word, as after SIGKILL."""
        self._is_ending.set()
        self._may_be_ready.set()
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = make_socket(
            context, zmq.DEALER, identity=pack_identity(self.index, self.epoch)
        )
        self._push = make_socket(context, zmq.PUSH)
        for socket in (self._dealer, self._push):
            socket.setsockopt(zmq.RECONNECT_IVL, 5)  # the client may bind later
            allow_ipv6(socket, self._wires.request.address)
            if self._keys is not None and self._wires.public_key is not None:
                make_client(socket, CurveLink(self._keys, self._wires.public_key))
        self._dealer.connect(self._wires.request.address)
        self._push.connect(self._wires.output.address)
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again where the test ends
            self.failure = error
        finally:
            self._dealer.close()
            self._push.close(linger=0 if self._last_words is None else 1000)
            context.term()

    def _serve(self) -> None:
        while not self._may_be_ready.wait(0.05):
            loading = Heartbeat(self.index, self.epoch, 0, self.heartbeat_age_ms, Phase.LOADING)
            self._send(OutputType.HEARTBEAT, loading)
        if not self._is_ending.is_set():
            self._dealer.send_multipart(self._encoder.encode(self._ready))
        heartbeat_at = 0.0
        while not self._is_ending.is_set():
            if time.monotonic() >= heartbeat_at and not self.is_silent:
                heartbeat_at = time.monotonic() + 0.05
                self._send(OutputType.HEARTBEAT, self._heartbeat())
            has_work = bool(self.running) and not self.is_paused
            if self._dealer.poll(0 if has_work else 5):
                self._take_in(self._dealer.recv_multipart())
            elif has_work:
                time.sleep(self.step_s)
                self._step()
        if self._last_words is not None:
            dead = EngineDead("ENGINE_CORE_DEAD", self.index, self.epoch, self._last_words)
            self._send(OutputType.DEAD, dead)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.index, self.epoch, self.num_steps, self.heartbeat_age_ms, Phase.EXECUTE
        )

    def _take_in(self, frames: list[bytes]) -> None:
        kind, *body = frames
        match RequestType(kind):
            case RequestType.ADD:
                request = codec.Decoder[EngineCoreRequest](EngineCoreRequest).decode(body)
                assert request.prompt_token_ids is not None
                self.received.append(request)
                self.num_prompt_tokens += len(request.prompt_token_ids)
                self._requests[request.request_id] = request
                given = request.output_token_ids
                num_given = 0 if given is None else len(given)
                self._num_outputs[request.request_id] = num_given
                tokens = itertools.islice(self.answer(request), num_given, None)
                self.running[request.request_id] = tokens
            case RequestType.ABORT:
                for request_id in codec.Decoder[list[str]](list[str]).decode(body):
                    self.aborted.append(request_id)
                    if self.running.pop(request_id, None) is not None:
                        ended = EngineCoreOutput(request_id, b"", FinishReason.ABORT)
                        self._send_outputs([ended])
            case RequestType.UTILITY:
                call = codec.Decoder[UtilityCall](UtilityCall).decode(body)
                self.calls.append(call)
                if self.answers_calls:
                    answer = EngineCoreOutputs(
                        self.index, self.epoch, utility=utility.answer(call, self)
                    )
                    self._send(OutputType.OUTPUTS, answer)
            case RequestType.FENCE:
                self.fences.append(codec.Decoder[Fence](Fence).decode(body))
            case _:
                raise AssertionError(f"unexpected {kind!r}")

    def _step(self) -> None:
        self.num_steps += 1
        self._send_outputs([self._next(request_id) for request_id in list(self.running)])

    def _next(self, request_id: str) -> EngineCoreOutput:
        request = self._requests[request_id]
        params = request.sampling_params
        assert params is not None
        token = next(self.running[request_id], FinishReason.STOP)
        count = self._num_outputs[request_id] = self._num_outputs[request_id] + 1
        given = request.output_token_ids
        is_first = count == 1 + (0 if given is None else len(given))
        finish = token if isinstance(token, FinishReason) else None
        if token == END or token in params.stop_token_ids:
            finish = FinishReason.STOP
        elif finish is None and count == params.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.running[request_id]
        tokens = [] if isinstance(token, FinishReason) else [token]
        return EngineCoreOutput(
            request_id,
            codec.pack_tokens(tokens),
            finish,
            token if token in params.stop_token_ids else None,
            self._details(request, tokens, is_first, finish),
        )

    def _details(
        self,
        request: EngineCoreRequest,
        tokens: list[int],
        is_first: bool,
        finish: FinishReason | None,
    ) -> OutputDetails | None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None
        assert prompt is not None
        now = time.monotonic()
        details = OutputDetails(
            new_logprobs=_logprobs(tokens, params.logprobs, params.logprob_token_ids),
            prompt_logprobs=_logprobs(prompt[1:].tolist(), params.prompt_logprobs)
            if is_first
            else None,
            events=[
                EngineCoreEvent(EventKind.QUEUED, now - 0.003),
                EngineCoreEvent(EventKind.SCHEDULED, now - 0.002),
            ]
            if is_first
            else None,
            prefill_stats=PrefillStats(len(prompt), self.num_cached_tokens) if is_first else None,
            error="the computed answer says so" if finish is FinishReason.ERROR else None,
        )
        return None if details == OutputDetails() else details

    def _send_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        stats = SchedulerStats(
            0,
            len(self.running),
            min(1.0, len(self.running) / 64),
            self.num_steps,
            prefix_cache_queries=7,
        )
        self._send(
            OutputType.OUTPUTS,
            EngineCoreOutputs(self.index, self.epoch, outputs, stats, time.monotonic()),
        )

    def _send(self, kind: OutputType, message: object) -> None:
        self._push.send_multipart([kind.value, *self._encoder.encode(message)])

    # ------------------------------------------------------------- what UTILITY calls run on

    def statistics(self) -> utility.Statistics:
        return utility.Statistics(SchedulerStats(0, len(self.running), 0.0), list[WorkerStats]())

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def profile(self, is_start: bool, directory: str) -> None:
        """There is nothing to trace."""
        if is_start == self.is_profiling:
            raise RequestFailedError("the profiler runs already" if is_start else NO_PROFILER)
        self.is_profiling = is_start

    def drop_client(self, client_index: int, arrived_before: float) -> int:
        """There is one client only."""
        return 0


def _logprobs(tokens: list[int], k: int | None, listed: tuple[int, ...] = ()) -> Logprobs | None:
    """Token t has log probability -t/10; the alternatives are tokens 97, 98, …, at -0.5, -1.5, …,
    or those that are listed."""
    if k is None or not tokens:
        return None
    best = [*listed] or [97 + i for i in range(k)]
    values = [-t / 10 for t in listed] or [-0.5 - i for i in range(k)]
    return Logprobs(
        token_ids=np.array([[t, *best] for t in tokens], dtype="<u4"),
        logprobs=np.array([[-t / 10, *values] for t in tokens], dtype="<f4"),
        ranks=np.ones(len(tokens), dtype="<u4"),
    )

"""The API server's side of wire 1 on real ZeroMQ sockets, blocking: what tests of the engine
process talk through."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import zmq

from engine import codec, utility
from engine.sampling_params import SamplingParams
from engine.sockets import make_socket
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    FinishReason,
    Heartbeat,
    OutputType,
    RequestType,
    UtilityOutput,
)

T = TypeVar("T")
OutputMessage = EngineCoreOutputs | Heartbeat | EngineDead
TIMEOUT_S = 20.0

_BODIES: dict[bytes, codec.Decoder[Any]] = {
    OutputType.OUTPUTS.value: codec.Decoder(EngineCoreOutputs),
    OutputType.HEARTBEAT.value: codec.Decoder(Heartbeat),
    OutputType.DEAD.value: codec.Decoder(EngineDead),
}


class ApiPeer:
    """Binds a ROUTER and a PULL in `folder`; a context manager."""

    def __init__(self, folder: Path, index: int = 0) -> None:
        self.index = index
        self.request_address = f"ipc://{folder}/request-{index}"
        self.output_address = f"ipc://{folder}/output-{index}"
        self.identity = b""
        self.log: list[OutputMessage] = []
        """Everything that has come on PULL, in order."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = make_socket(self._context, zmq.ROUTER)
        self._pull = make_socket(self._context, zmq.PULL)
        self._router.bind(self.request_address)
        self._pull.bind(self.output_address)
        self._encoder = codec.Encoder()

    def __enter__(self) -> "ApiPeer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._router.close()
        self._pull.close()
        self._context.term()

    # ------------------------------------------------------------------------------- sending

    def send(self, kind: bytes, *frames: bytes | memoryview) -> None:
        """Send raw frames to the engine core."""
        self._router.send_multipart([self.identity, kind, *frames])

    def send_message(self, kind: RequestType, message: object) -> None:
        self.send(kind.value, *self._encoder.encode(message))

    def add(self, request_id: str, prompt: int = 4, **fields: Any) -> None:
        """Send a request of `prompt` tokens; `fields` go to SamplingParams."""
        self.send_message(RequestType.ADD, make_request(request_id, prompt, self.index, **fields))

    def abort(self, *request_ids: str) -> None:
        self.send_message(RequestType.ABORT, list(request_ids))

    def call(self, method: str, *args: object) -> Any:
        """Run a utility method and return its result."""
        self.send_message(RequestType.UTILITY, utility.make_call(self.index, 7, method, args))
        return utility.read_answer(method, self.wait_for_answer())

    # ----------------------------------------------------------------------------- receiving

    def wait_ready(self) -> EngineReady:
        """Return the first message on the ROUTER, which must be READY, and learn who sent it."""
        assert self._router.poll(int(TIMEOUT_S * 1000)), "no READY came"
        self.identity, *body = self._router.recv_multipart()
        return codec.Decoder[EngineReady](EngineReady).decode(body)

    def receive(self, timeout_s: float = TIMEOUT_S) -> OutputMessage | None:
        """Return the next message on PULL, or None if none comes in time."""
        if not self._pull.poll(max(0, int(timeout_s * 1000))):
            return None
        kind, *body = self._pull.recv_multipart()
        message: OutputMessage = _BODIES[kind].decode(body)
        self.log.append(message)
        return message

    def messages(self, timeout_s: float = TIMEOUT_S) -> Iterator[OutputMessage]:
        """Yield messages as they come; fails the test when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (message := self.receive(deadline - time.monotonic())) is not None:
            yield message
        raise AssertionError(f"nothing more within {timeout_s} s; came: {self.log[-5:]}")

    def wait_for(
        self,
        kind: type[T],
        accept: Callable[[T], bool] = lambda _: True,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        """Return the next message of that type that `accept` likes."""
        return next(m for m in self.messages(timeout_s) if isinstance(m, kind) and accept(m))

    def outputs(self, *request_ids: str) -> Iterator[EngineCoreOutput]:
        """Yield the outputs of these requests as they come."""
        for message in self.messages():
            if isinstance(message, EngineCoreOutputs):
                yield from (o for o in message.outputs if o.request_id in request_ids)

    def finish(self, request_id: str) -> tuple[list[int], FinishReason]:
        """Read until the request has ended; return its tokens and why it did."""
        return self.finish_all(request_id)[request_id]

    def finish_all(self, *request_ids: str) -> dict[str, tuple[list[int], FinishReason]]:
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        ends: dict[str, tuple[list[int], FinishReason]] = {}
        for output in self.outputs(*request_ids):
            tokens[output.request_id] += codec.unpack_tokens(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = tokens[output.request_id], output.finish_reason
            if len(ends) == len(tokens):
                break
        return ends

    def wait_for_answer(self) -> UtilityOutput:
        outputs = self.wait_for(EngineCoreOutputs, lambda m: m.utility is not None)
        assert outputs.utility is not None
        return outputs.utility


def make_request(
    request_id: str, prompt: int = 4, client_index: int = 0, **fields: Any
) -> EngineCoreRequest:
    """A request of `prompt` tokens 1, 2, 3, …; `fields` go to SamplingParams."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(1, prompt + 1, dtype="<u4") % 900,
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 4, **fields}),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=client_index,
    )


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for socket files. Not pytest's own: its paths can be too long for them."""
    with tempfile.TemporaryDirectory(prefix="raywire-test-") as folder:
        yield Path(folder)

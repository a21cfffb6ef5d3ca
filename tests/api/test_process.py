"""How an API server starts, drains, ends, and what it never imports."""

import asyncio
import contextlib
import gc
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from api import answer
from api.chat_template import ChatTemplate
from api.input_processor import InputProcessor
from engine.errors import ConfigError, EngineDeadError
from engine.wire import EngineCoreRequest, EngineReady, FinishReason
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for


class Stream:
    """A streamed completion that is read in the background."""

    def __init__(self, server: HttpServer, **fields: Any) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.headers: httpx.Headers | None = None
        body = {"prompt": "x", "max_tokens": 900, "stream": True, **fields}
        self._thread = threading.Thread(target=self._read, args=(server, body), daemon=True)
        self._thread.start()

    def _read(self, server: HttpServer, body: dict[str, Any]) -> None:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            self.status, self.headers = response.status_code, response.headers
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)

    def wait_first(self) -> None:
        wait_for(lambda: self.lines, "the first event")

    def join(self) -> list[str]:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.lines


@contextlib.contextmanager
def streaming(**options: Any) -> Iterator[tuple[HttpServer, Stream]]:
    """A server with one endless stream under way."""
    step_s = options.pop("step_s", 0.002)
    max_tokens = options.pop("max_tokens", 900)
    with serving(endless_answer, engine_options={"step_s": step_s}, **options) as server:
        stream = Stream(server, max_tokens=max_tokens)
        stream.wait_first()
        yield server, stream


def test_torch_is_not_imported() -> None:
    """Nor what would import it: importing the whole API server takes well under a second."""
    code = (
        "import api.process, api.app, sys; "
        "print([m for m in ('torch', 'transformers', 'ray', 'workers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


def test_port_answers_while_the_start_is_under_way() -> None:
    """The model may take minutes; the port says so meanwhile."""
    may_go_on = threading.Event()

    def slow_start(folder: Path) -> Path:
        assert may_go_on.wait(20)
        return folder

    with serving(waits_until_ready=False, start=slow_start) as server:
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/ready").status_code == 503
        may_go_on.set()
        server.wait_ready()


def test_config_error_of_the_start_is_raised() -> None:
    """Whoever called prints one line; the port is free again."""

    def failing_start(folder: Path) -> Path:
        raise ConfigError("no such model")

    with serving(waits_until_ready=False, start=failing_start) as server:
        with pytest.raises(ConfigError, match="no such model"):
            server.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{server.port}/live")


def test_broken_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    """Found at once, although the engine cores may take minutes to say anything."""
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with serving(
        waits_until_ready=False, start=lambda _: tmp_path, engine_options={"is_ready": False}
    ) as server:
        with pytest.raises(ConfigError):
            server.join()


@pytest.mark.row("F-52")
def test_signal_during_the_start_ends_it() -> None:
    """Whatever the start is waiting for."""
    with serving(waits_until_ready=False, engine_options={"is_ready": False}) as server:
        wait_for(lambda: server.http.get("/live").status_code == 200)
        began = time.monotonic()
        server.stop.set()

        assert server.join() == 0
        assert time.monotonic() - began < 5.0


@pytest.mark.row("F-50")
def test_drain_lets_streams_finish_and_refuses_new_requests() -> None:
    """Readiness goes at once; the stream ends as it would have; the exit code is 0."""
    with streaming(step_s=0.001, max_tokens=400) as (server, stream):
        server.stop.set()
        wait_for(lambda: server.http.get("/ready").status_code == 503)

        refused = server.complete(prompt="x")
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"] == "5"
        not_ready = server.http.get("/ready").json()
        assert not_ready["status"] == "draining"
        assert not_ready["reason"] == "the server is stopping; 1 requests still run"
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/health").status_code == 200

        lines = stream.join()
        assert '"finish_reason":"length"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert server.join() == 0
        assert server.engine.aborted == []


def test_drain_without_work_ends_at_once() -> None:
    """Idle keep-alive connections hold nobody up."""
    with serving() as server:
        server.http.get("/health")
        began = time.monotonic()
        server.stop.set()

        assert server.join() == 0
        assert time.monotonic() - began < 5.0


@pytest.mark.row("F-50")
def test_drain_cuts_what_takes_too_long() -> None:
    """With one error event and no `[DONE]`; the engine hears of it."""
    with streaming(shutdown_timeout_s=0.1, step_s=0.02) as (server, stream):
        server.stop.set()

        lines = stream.join()
        assert '"error":{"message":"the server is shutting down"' in lines[-1]
        assert sum('"error"' in line for line in lines) == 1
        assert "data: [DONE]" not in lines
        assert server.join() == 0
        assert len(server.engine.aborted) == 1


@pytest.mark.row("F-50")
def test_second_signal_ends_a_drain_at_once() -> None:
    """However long the first one would have let it last."""
    with streaming(shutdown_timeout_s=600.0, step_s=0.02) as (server, stream):
        server.stop.set()
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        began = time.monotonic()
        server.stop.set()

        assert "shutting down" in stream.join()[-1]
        assert server.join() == 0
        assert time.monotonic() - began < 10.0


def test_who_does_not_read_is_cut_off_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """A stop is one in order, whatever clients do."""
    name = "m" * 4000  # it is in every event
    with (
        serving(
            endless_answer,
            engine_options={"step_s": 0.001},
            served_model_names=(name,),
            shutdown_timeout_s=0.1,
        ) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"model": name, "prompt": "x", "max_tokens": 900, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        wait_for(lambda: server.engine.running)
        wait_for(lambda: not server.engine.running, "the last token")  # most of it unsent

        server.stop.set()
        assert server.join() == 0
    assert "cutting requests that still run" in caplog.text
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def send_half_a_body(server: HttpServer) -> socket.socket:
    """A request whose body stops before its end."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
    connection.sendall(head.encode() + b"{" * 500)
    return connection


@pytest.mark.row("F-32")
def test_body_that_does_not_come_is_given_up() -> None:
    """With a 408, and the connection is closed."""
    with serving(body_timeout_s=0.2) as server, send_half_a_body(server) as connection:
        answer = read_all(connection)

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_unfinished_bodies_are_bounded_together() -> None:
    """Each is within its bound; who comes when there are too many is asked to come again."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(max_body_bytes=1000))
        connections = [stack.enter_context(send_half_a_body(server)) for _ in range(65)]

        refused, _, _ = select.select(connections, [], [], 20)

        assert refused[0].recv(1 << 16).startswith(b"HTTP/1.1 503 ")


@pytest.mark.row("F-50")
def test_drain_does_not_wait_for_a_body() -> None:
    """However long a drain may last: who has not said what it wants gets a 503."""
    with serving(shutdown_timeout_s=600.0) as server, send_half_a_body(server) as connection:
        assert server.complete(prompt="x").status_code == 200  # so the other is being read
        server.stop.set()

        assert read_all(connection).startswith(b"HTTP/1.1 503 ")
        assert server.join() == 0


def test_engine_death_answers_everybody_and_ends_the_server() -> None:
    """One error event on the stream, a 503 for who waits or comes later, and exit code 1."""
    with streaming(dead_linger_s=0.5) as (server, stream):
        server.engine.is_paused = True
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(server.complete(prompt="x")))
        waiting.start()
        wait_for(lambda: len(server.engine.running) == 2)

        server.engine.die("worker 0 was killed; its secrets are in /tmp/secret")

        lines = stream.join()
        assert '"code":"engine_dead"' in lines[-1]
        assert sum('"error"' in line for line in lines) == 1
        waiting.join(20)
        late = server.complete(prompt="x")
        for response in (answers[0], late):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_dead"
            assert "secret" not in response.text
        for path in ("/health", "/live", "/ready"):
            assert server.http.get(path).status_code == 503
        failed = 'raywire:request_success_total{engine="0",finished_reason="error",model_name="m"}'
        assert server.metric(failed) == 2
        assert server.join() == 1


def test_death_during_the_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """By whoever saw it first, not again as an exception of a task that nobody asks."""
    is_patched = threading.Event()

    def start(folder: Path) -> Path:
        assert is_patched.wait(20)
        return folder

    is_waiting = threading.Event()

    async def fail_when_cancelled(timeout_s: float, waited_s: float = 0.0) -> list[EngineReady]:
        is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise EngineDeadError(0, "its own last words") from None
        raise AssertionError

    with serving(waits_until_ready=False, start=start) as server:
        server.client.wait_ready = fail_when_cancelled  # type: ignore[method-assign]
        is_patched.set()
        assert is_waiting.wait(20)
        server.client.mark_dead(0, "its own last words")

        assert server.join() == 1
    gc.collect()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_wait_for_engine_cores_counts_from_when_the_start_began() -> None:
    """Not from when they exist: what was waited for before is part of the one deadline."""
    with serving(
        waits_until_ready=False,
        engine_options={"is_ready": False},
        start_timeout_s=60.0,
        dead_linger_s=0.1,
        began=lambda: time.monotonic() - 60.0,
    ) as server:
        assert server.join() == 1
    assert server.client.death is not None
    assert "no READY within 60 s" in server.client.death.cause


def test_no_timer_looks_whether_an_idle_server_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals and deaths wake the event loop. What is left is uvicorn's date, once a second."""
    delays: list[float] = []
    num_ticks = 0
    sleep, on_tick = asyncio.sleep, uvicorn.Server.on_tick

    async def noted_sleep(delay: float, *arguments: Any) -> Any:
        delays.append(delay)
        return await sleep(delay, *arguments)

    async def noted_tick(server: uvicorn.Server, counter: int) -> bool:
        nonlocal num_ticks
        num_ticks += 1
        return await on_tick(server, counter)

    with serving() as server:
        server.complete(prompt="x", max_tokens=1)
        with monkeypatch.context() as patch:
            patch.setattr(uvicorn.Server, "on_tick", noted_tick)
            patch.setattr(asyncio, "sleep", noted_sleep)
            began_s = time.monotonic()
            wait_for(lambda: num_ticks >= 2, "two ticks")
            seconds = time.monotonic() - began_s
        server.stop.set()
        assert server.join() == 0
    assert delays == [], "something polls"
    assert num_ticks <= 2 + seconds


def test_hung_engine_is_a_dead_engine() -> None:
    """No heartbeat: `/live` asks for a restart and nobody waits any longer."""
    with serving(heartbeat_timeout_s=0.4, dead_linger_s=0.5) as server:
        server.engine.is_paused = server.engine.is_silent = True

        assert server.complete(prompt="x").json()["error"]["code"] == "engine_dead"
        live = server.http.get("/live")
        assert (live.status_code, live.json()["error"]["message"]) == (503, "the server is hung")
        assert server.join() == 1


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.row("F-29")
def test_disconnect_aborts(is_streamed: bool, is_running: bool) -> None:
    """While tokens come, and while the request is still queued; all n of them."""
    with serving(endless_answer, engine_options={"step_s": 0.005}) as server:
        server.engine.is_paused = not is_running
        body = {"prompt": "x", "max_tokens": 900, "n": 2, "stream": is_streamed}
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.sendall((head + text).encode())
            wait_for(lambda: len(server.engine.received) == 2)
            if is_streamed and is_running:
                assert connection.recv(1)
        wait_for(lambda: len(server.engine.aborted) == 2, "both aborts")
        server.engine.is_paused = False
        server.wait_idle()
        aborted = 'raywire:request_success_total{engine="0",finished_reason="abort",model_name="m"}'
        wait_for(lambda: server.metric(aborted) == 2)
        assert server.client.num_in_flight == 0


def test_short_texts_are_tokenized_at_once_and_long_ones_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread would take longer to wake up; but nothing long may hold up the event loop."""
    threads: list[str] = []
    encode = InputProcessor.encode

    def note(self: InputProcessor, text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, **options)

    monkeypatch.setattr(InputProcessor, "encode", note)
    with serving() as server:
        server.complete(prompt="short")
        server.complete(prompt="short", user="x" * answer.QUICK_BYTES)
        server.complete(prompt=["many"] * 20)

    assert threads == ["server", "text-short", *["text-short"] * 20]


def test_text_of_a_client_that_has_gone_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its place in the queue is free for those who stay. The bodies are too long to be done with at
    once."""
    padding = {"user": "x" * answer.QUICK_BYTES}
    has_begun, may_end = threading.Event(), threading.Event()
    caplog.set_level("INFO", "api.edge")
    texts: list[str] = []
    encode = InputProcessor.encode

    def encode_slowly(self: InputProcessor, text: str, **options: Any) -> list[int]:
        texts.append(text)
        has_begun.set()
        assert may_end.wait(20)
        return encode(self, text, **options)

    with serving(num_text_threads=1) as server, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(InputProcessor, "encode", encode_slowly)
        slow = pool.submit(server.complete, prompt="slow", **padding)
        assert has_begun.wait(20)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{server.port}/v1/completions",
                json={"prompt": "gone", **padding},
                timeout=httpx.Timeout(20, read=0.2),
            )
        wait_for(lambda: " 499 " in caplog.text, "the end of the one that has gone")
        next_ = pool.submit(server.complete, prompt="next", **padding)
        may_end.set()

        assert (slow.result(20).status_code, next_.result(20).status_code) == (200, 200)
        assert texts == ["slow", "next"]


def test_failure_before_the_first_token_is_a_500() -> None:
    """With the engine's own words, which are made for clients; the server goes on."""
    with serving(lambda request: [FinishReason.ERROR]) as server:
        for is_streamed in (False, True):
            response = server.complete(prompt="x", stream=is_streamed)
            assert response.status_code == 500
            assert response.json()["error"] == {
                "message": "the computed answer says so",
                "type": "server_error",
                "param": None,
                "code": "request_failed",
            }
        assert server.http.get("/health").status_code == 200


def test_failure_after_the_first_token_is_one_event_and_the_end() -> None:
    """The headers are out, so the error is the last event."""
    has_begun = threading.Event()

    def answer(request: EngineCoreRequest) -> Iterator[int | FinishReason]:
        yield 97
        has_begun.wait(20)
        yield FinishReason.ERROR

    with serving(answer) as server:
        stream = Stream(server)
        stream.wait_first()
        has_begun.set()

        first, last = stream.join()
        assert '"text":"a"' in first
        assert '"code":"request_failed"' in last


@pytest.mark.row("F-34")
def test_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    """7 MB of text for a model that takes 1000 tokens: 400 at once."""
    with serving() as server:
        began = time.monotonic()

        response = server.complete(prompt="lorem ipsum " * (7 << 20 >> 4))

        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - began < 5.0  # tokenizing it takes a quarter of a minute


@pytest.mark.row("F-34")
def test_long_prompts_hold_nobody_up() -> None:
    """Four of them are tokenized for seconds; probes and short prompts are answered meanwhile."""
    with serving(engine_options={"max_model_len": 10_000_000}) as server:
        text = "lorem ipsum dolor sit amet " * (1 << 15)
        with ThreadPoolExecutor(4) as pool:
            long_ones = [pool.submit(server.complete, prompt=text) for _ in range(4)]
            all_began = time.monotonic()
            slowest, num_answered = 0.0, 0
            while not any(each.done() for each in long_ones):
                began = time.monotonic()
                assert server.http.get("/health").status_code == 200
                assert server.complete(prompt="short").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                num_answered += 1
            took = time.monotonic() - all_began
            server.stop.set()
            server.stop.set()  # and nobody waits for the rest of them
            assert server.join() == 0
        assert num_answered >= 2
        assert slowest < took / 2


def test_a_slow_template_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one conversation is rendered, and does not get on, all else is answered: templates that
    take long even with a short one are found out when they are loaded."""
    template = "{% for i in range(200) %}{% for j in range(200) %}{% endfor %}{% endfor %}hello"
    has_begun, may_end = threading.Event(), threading.Event()
    render = ChatTemplate.render

    def render_slowly(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        has_begun.set()
        assert may_end.wait(20)
        return render(self, *args, **kwargs)

    with serving(chat_template=template) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(ChatTemplate, "render", render_slowly)
        slow = pool.submit(server.chat, "hello")
        assert has_begun.wait(20)
        try:
            assert server.http.get("/health", timeout=5).status_code == 200
            assert server.complete(prompt="short").json()["choices"][0]["text"] == "short"
        finally:
            may_end.set()
        assert "hello" in slow.result(20).json()["choices"][0]["message"]["content"]

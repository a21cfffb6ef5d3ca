"""Requests that ask for more than anybody could give, to a real server: refused at once, and nobody
else notices."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from cluster.scripted_source import VOCAB_SIZE
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, cpu_seconds, running_server
from tests.helpers.streams import BackgroundStream, completion_body, metric

MAX_MODEL_LEN = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Speaks `abc` for ever, at a hundred tokens a second."""
    model = make_slow_model(tmp_path_factory.mktemp("models"), 0.01)
    flags = ("--served-model-name", "m", "--max-model-len", str(MAX_MODEL_LEN), "--max-n", "64")
    with running_server(str(model), *flags) as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def rss(server: Server) -> int:
    """Resident memory of all its processes."""
    return sum(psutil.Process(p.pid).memory_info().rss for p in server.processes())


class Prober:
    """Asks /health again and again, and keeps how long the slowest answer took."""

    def __init__(self, server: Server) -> None:
        self.slowest_s = 0.0
        self.num_answers = 0
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._server.http() as client:
            while not self._stop.wait(0.005):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.num_answers += 1

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


MONSTROUS: list[dict[str, Any]] = [
    {"n": 100_000},
    {"n": 2**63},
    {"best_of": 100_000},
    {"n": 64, "prompt": ["x"] * 64},
    {"n": 1, "best_of": 64, "prompt": ["x"] * 64},
    {"n": 8, "prompt": ["x"] * 1024},
    {"n": 8, "use_beam_search": True, "prompt": ["x"] * 1024},
    {"logprobs": 10**6},
    {"stop": [f"{i}" for i in range(10_000)]},
    {"stop": [""]},
    {"stop": ["x" * (1 << 20)]},
    {"logit_bias": {str(i): 1 for i in range(100_000)}},
]


@pytest.mark.row("S-19", "S-20", "F-37")
def test_a_monstrous_request_is_refused_at_once(server: Server, http: httpx.Client) -> None:
    """Within 200 ms of the API server's processor, with no memory to speak of, while /health
    answers as ever."""
    http.post("/v1/completions", json=completion_body(max_tokens=1))
    before = rss(server)
    with Prober(server) as prober:
        for fields in MONSTROUS:
            content = json.dumps(completion_body(**fields))
            began = cpu_seconds(server.process.pid)  # wall time would be that of a crowded machine
            response = http.post("/v1/completions", content=content)
            assert cpu_seconds(server.process.pid) - began < 0.2, fields.keys()
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] in fields, response.text

    assert rss(server) - before < 50 << 20
    assert prober.num_answers
    assert prober.slowest_s < 2.0  # 1 s, and a crowded machine


def test_max_n_is_the_servers_own(http: httpx.Client) -> None:
    """--max-n 64, where 128 are the default; the document says so too."""
    accepted = http.post("/v1/completions", json=completion_body(n=64, max_tokens=1))
    refused = http.post("/v1/completions", json=completion_body(n=65))
    shown = http.get("/openapi.json").json()["components"]["schemas"]

    assert len(accepted.json()["choices"]) == 64
    assert "from 1 to 64" in refused.json()["error"]["message"]
    for body in ("ChatBody", "CompletionBody"):
        assert shown[body]["properties"]["n"]["anyOf"][0]["maximum"] == 64


@pytest.mark.row("S-21")
@pytest.mark.parametrize("prompt", [" ", "\n\t ", "\u3000", [" ", "\n"], [[0]], "\0"])
def test_a_prompt_of_nothing_visible_is_one(http: httpx.Client, prompt: object) -> None:
    """White space, and bytes that nobody sees, are tokens like any other."""
    response = http.post("/v1/completions", json=completion_body(prompt=prompt, max_tokens=3))

    assert response.status_code == 200
    assert {choice["text"] for choice in response.json()["choices"]} == {"abc"}


@pytest.mark.row("F-33")
def test_what_does_not_fit_is_refused_and_never_cut(server: Server, http: httpx.Client) -> None:
    """One token less than the length works, with a token; the length itself, one more, and an
    answer that is too long do not. The engine hears of the first only."""
    before = metric(server, "raywire:prompt_tokens_total")

    answers = [
        http.post("/v1/completions", json=completion_body(prompt="x" * length, max_tokens=tokens))
        for length, tokens in (
            (MAX_MODEL_LEN - 1, 1),
            (MAX_MODEL_LEN, 1),
            (MAX_MODEL_LEN + 1, 1),
            (MAX_MODEL_LEN - 1, 2),
            (10, MAX_MODEL_LEN - 9),
        )
    ]

    assert [answer.status_code for answer in answers] == [200, 400, 400, 400, 400]
    assert answers[0].json()["usage"]["completion_tokens"] == 1
    for answer in answers[1:]:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert metric(server, "raywire:prompt_tokens_total") - before == MAX_MODEL_LEN - 1


IDS = ["-1", str(VOCAB_SIZE), "2147483648", "9223372036854775808", "1.5", "true", '"5"', "null"]


def bodies_with_wrong_ids() -> Iterator[tuple[str, str]]:
    """JSON, as Python would not write it, each with the field that is wrong."""
    for token_id in IDS:
        yield "prompt", f'{{"prompt": [1, {token_id}]}}'
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            yield field, f'{{"prompt": "x", "logprobs": 1, "{field}": [0, {token_id}]}}'
        if not token_id.startswith('"'):
            yield "logit_bias", f'{{"prompt": "x", "logit_bias": {{"{token_id}": 1}}}}'


@pytest.mark.row("F-35", "S-52")
def test_ids_that_are_none_harm_no_neighbour(server: Server, http: httpx.Client) -> None:
    """Each is a 400 that names its field, in every field that takes ids; a seeded stream beside
    them is the one that it is without them, bit for bit."""
    asked: dict[str, Any] = {"max_tokens": 300, "seed": 7, "temperature": 1.0, "logprobs": 2}
    alone = BackgroundStream(server, **asked)
    alone.join()
    neighbour = BackgroundStream(server, **asked)
    assert neighbour.started.wait(10)

    for field, body in bodies_with_wrong_ids():
        response = http.post("/v1/completions", content=body)
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["param"].startswith(field), (body, response.text)
    neighbour.join()

    assert neighbour.text == alone.text
    assert (neighbour.finish_reasons, neighbour.errors) == (["length"], [])
    assert logprobs(neighbour) == logprobs(alone)


def logprobs(stream: BackgroundStream) -> list[float]:
    choices = [choice for event in stream.events for choice in event["choices"]]
    return [each for choice in choices for each in choice["logprobs"]["token_logprobs"]]


@pytest.mark.row("S-55")
def test_equal_ids_of_clients_are_different_requests(server: Server, http: httpx.Client) -> None:
    """Sent at once under one name, in header and body, each is answered; ending one ends no
    other."""
    body = completion_body(request_id="mine", max_tokens=100, stream=True)
    first = BackgroundStream(server, request_id="mine", max_tokens=100)
    assert first.started.wait(10)
    with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as cut:
        next(cut.iter_lines())
    second = BackgroundStream(server, request_id="mine", max_tokens=50)
    first.join()
    second.join()

    assert (len(first.text), len(second.text)) == (100, 50)

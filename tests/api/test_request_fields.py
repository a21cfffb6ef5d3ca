"""What vLLM's own request fields do, on both routes, with computed answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.wire import EngineCoreRequest
from tests.helpers.fake_engine import prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, events, serving

USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(trust_request_chat_template=True, scheduling_policy="priority") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose answer to a prompt is the prompt; tests may change that."""
    shared.engine.answer = prompt_as_answer
    shared.engine.received.clear()
    return shared


def choices(server: HttpServer, **fields: Any) -> list[dict[str, Any]]:
    response = server.complete(**fields)
    assert response.status_code == 200, response.text
    assert "x-raywire-ignored" not in response.headers
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def chat(server: HttpServer, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages or [USER], "max_tokens": 500, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert "x-raywire-ignored" not in response.headers
    answer: dict[str, Any] = response.json()
    return answer


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def only_request(server: HttpServer) -> EngineCoreRequest:
    [request] = server.engine.received
    return request


# ------------------------------------------------------------------------------------------ prompts


def test_texts_and_token_ids_in_one_batch(server: HttpServer) -> None:
    """Each prompt is what it looks like, whatever stands beside it."""
    found = choices(server, prompt=["a", [98, 98], "[[", [99]])

    assert [choice["text"] for choice in found] == ["a", "bb", "[[", "c"]
    assert [c["text"] for c in choices(server, prompt=[[97], '"b'])] == ["a", '"b']


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 8}, "abcdefgh"),
        ({"truncate_prompt_tokens": 1000}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdefgh", [*b"abcdefgh"]])
def test_long_prompt_is_cut(
    server: HttpServer, prompt: str | list[int], fields: dict[str, Any], kept: str
) -> None:
    """To so many tokens, from the left unless the right is asked for; usage and echo count what is
    left."""
    [choice] = choices(server, prompt=prompt, max_tokens=8, **fields)
    body = server.complete(prompt=prompt, max_tokens=0, echo=True, **fields).json()

    assert choice["text"] == kept
    assert body["choices"][0]["text"] == kept
    assert body["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("prompt", ["x" * 5000 + "y", [*b"x" * 5000, *b"y"], "z" * 400_000 + "y"])
def test_prompt_beyond_the_models_length_is_cut_to_it(
    server: HttpServer, prompt: str | list[int]
) -> None:
    """-1 leaves room for `max_tokens`, and without them for 16."""
    for fields, room in (({"max_tokens": 100}, 100), ({}, 16)):
        usage = server.complete(prompt=prompt, truncate_prompt_tokens=-1, **fields).json()["usage"]
        assert usage == usage | {"prompt_tokens": 1000 - room, "completion_tokens": room}
        assert only_request(server).prompt_token_ids[-1] == ord("y")  # type: ignore[index]
        server.engine.received.clear()


def test_long_conversation_is_cut(server: HttpServer) -> None:
    """By the same fields, after the template."""
    answer = chat(server, truncate_prompt_tokens=9)

    assert content(answer) == "ssistant>"[-9:]
    assert content(chat(server, truncate_prompt_tokens=4, truncation_side="right")) == "<use"


BOS = 257


def with_begin_token(folder: Path) -> Path:
    """The model folder, with a begin token that the tokenizer puts before each text."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(file))
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"bos_token": "<s>"}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def with_bos() -> Iterator[HttpServer]:
    with serving(start=with_begin_token) as server:
        yield server


@pytest.mark.parametrize(("wish", "has_begin"), [(None, True), (True, True), (False, False)])
def test_special_tokens_are_added_where_asked_for(
    with_bos: HttpServer, wish: bool | None, has_begin: bool
) -> None:
    """By default before the text of a completion, and not before a chat: its template writes it."""
    fields = {"max_tokens": 1, "return_token_ids": True, "add_special_tokens": wish}

    [choice] = choices(with_bos, prompt="ab", **fields)
    answer = chat(with_bos, **fields)

    assert choice["prompt_token_ids"] == [BOS] * has_begin + [*b"ab"]
    assert answer["prompt_token_ids"][: wish is True] == [BOS] * (wish is True)
    assert bytes(answer["prompt_token_ids"][wish is True :]) == b"<user>hello<assistant>"


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [BOS, *b"fgh"]), ("right", [BOS, *b"abc"]), (None, [BOS, *b"fgh"])]
)
def test_begin_token_of_a_text_stays(
    with_bos: HttpServer, side: str | None, kept: list[int]
) -> None:
    """Models go astray without it. Token ids are what the client wants them to be."""
    fields: dict[str, Any] = {"truncate_prompt_tokens": 4, "truncation_side": side, "max_tokens": 1}

    [text] = choices(with_bos, prompt="abcdefgh", return_token_ids=True, **fields)
    [tokens] = choices(with_bos, prompt=[BOS, *b"abcdefgh"], return_token_ids=True, **fields)

    assert text["prompt_token_ids"] == kept
    assert tokens["prompt_token_ids"] == ([BOS, *b"abc"] if side == "right" else [*b"efgh"])


# ------------------------------------------------------------------------------------- the template


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ documents }}{{ x }}"


def test_clients_template_is_used_where_it_is_trusted(server: HttpServer) -> None:
    """For this request only, as often as it comes."""
    for _ in range(2):
        assert content(chat(server, chat_template=TEMPLATE)).startswith("[hello]")
        assert content(chat(server)) == "<user>hello<assistant>"


def test_clients_template_is_refused_unless_it_is_trusted() -> None:
    """It is a program: the operator decides."""
    with serving() as server:
        error = server.chat(chat_template=TEMPLATE).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", "chat_template")
    assert "--trust-request-chat-template" in error["message"]


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "x" * ((1 << 18) + 1)])
def test_broken_template_of_a_client_is_its_mistake(server: HttpServer, source: str) -> None:
    """A 400 that names the field; it is not kept."""
    response = server.chat(chat_template=source)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    ("source", "param", "said"),
    [
        ("{{ 1/0 }}", "chat_template", "division by zero"),
        ("{{ messages.x.y }}", "chat_template", "no attribute 'x'"),
        ("{{ ''.__class__.mro() }}", "chat_template", "unsafe"),
        ("{{ raise_exception('no, thanks') }}", "messages", "no, thanks"),
        ("", "chat_template", "rendered nothing"),
        ("{% if false %}x{% endif %}", "chat_template", "rendered nothing"),
    ],
)
def test_template_of_a_client_that_fails_is_to_blame(
    server: HttpServer, source: str, param: str, said: str
) -> None:
    """Not the messages, unless it says so itself."""
    response = server.chat(chat_template=source)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_many_templates_of_clients_do_not_pile_up(server: HttpServer) -> None:
    """The last few are kept compiled; each is rendered as what it is."""
    for number in range(20):
        assert content(chat(server, chat_template=f"<{number}>")) == f"<{number}>"


def test_template_quotes_documents(server: HttpServer) -> None:
    """As objects with texts."""
    documents = [{"title": "t", "text": "d"}]
    template = "{% for d in documents %}{{ d.title }}:{{ d.text }};{% endfor %}"

    assert content(chat(server, chat_template=template, documents=documents)) == "t:d;"
    assert content(chat(server, chat_template="{{ documents }}", documents=[])) == "None"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "-,-"),
        ({"reasoning_effort": "high"}, "high,True"),
        ({"reasoning_effort": "none"}, "none,False"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "low,False",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "low,True",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 7}}, "-,7"),
    ],
)
def test_template_reads_its_variables(
    server: HttpServer, fields: dict[str, Any], seen: str
) -> None:
    """`reasoning_effort` is one of them, and says whether to think at all unless that is said."""
    template = "{{ reasoning_effort | default('-') }},{{ enable_thinking | default('-') }}"

    assert content(chat(server, chat_template=template, **fields)) == seen


@pytest.mark.parametrize("is_streamed", [False, True])
def test_rendered_prompt_on_request(server: HttpServer, is_streamed: bool) -> None:
    """Whole, and once in a stream."""
    response = server.chat("hello", return_prompt_text=True, stream=is_streamed)

    parts = events(response) if is_streamed else [response.json()]
    assert parts[0]["prompt_text"] == "<user>hello<assistant>"
    assert all("prompt_text" not in part for part in parts[1:])


@pytest.mark.parametrize("n", [1, 2])
def test_chat_repeats_the_assistants_last_message(server: HttpServer, n: int) -> None:
    """With `echo`, whole and streamed, for each choice; not a message of somebody else."""
    server.engine.answer = text_as_answer(" four.")
    open_end = {"role": "assistant", "content": [{"type": "text", "text": "The sum is"}]}
    fields: dict[str, Any] = {"echo": True, "n": n, "continue_final_message": True}

    whole = chat(server, USER, open_end, **fields)
    body = {"messages": [USER, open_end], "stream": True, **fields}
    chunks = events(server.http.post("/v1/chat/completions", json=body))

    assert [c["message"]["content"] for c in whole["choices"]] == ["The sum is four."] * n
    for index in range(n):
        of_one = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert of_one[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in of_one)
        assert text == "The sum is four."
    assert content(chat(server, echo=True)) == " four."


# -------------------------------------------------------------------------------------- log probs


def test_log_probabilities_of_certain_tokens(server: HttpServer) -> None:
    """Of these, in the order of the request, on both routes."""
    fields: dict[str, Any] = {"logprob_token_ids": [120, 65]}

    [legacy] = choices(server, prompt="h", logprobs=0, **fields)
    first = chat(server, logprobs=True, **fields)["choices"][0]["logprobs"]["content"][0]

    assert legacy["logprobs"]["top_logprobs"][0] == pytest.approx(
        {"h": -10.4, "x": -12.0, "A": -6.5}
    )
    assert [(t["token"], t["logprob"]) for t in first["top_logprobs"]] == [
        ("x", pytest.approx(-12.0)),
        ("A", pytest.approx(-6.5)),
    ]


def test_tokens_as_ids_in_log_probabilities(server: HttpServer) -> None:
    """Parts of characters can be told apart, and bytes and offsets stay those of the text."""
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True}

    [legacy] = choices(server, prompt="hé", logprobs=1, echo=True, max_tokens=1, **fields)
    first = chat(server, logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"][
        "content"
    ][0]

    shape = legacy["logprobs"]
    assert shape["tokens"] == [f"token_id:{i}" for i in (104, 195, 169, 104)]
    assert shape["text_offset"] == [0, 1, 1, 2]
    assert shape["top_logprobs"][1] == pytest.approx({"token_id:195": -19.5, "token_id:97": -0.5})
    assert (first["token"], first["bytes"]) == ("token_id:60", [60])
    assert (first["top_logprobs"][0]["token"], first["top_logprobs"][0]["bytes"]) == (
        "token_id:97",
        [97],
    )


def test_server_may_write_tokens_as_ids_for_all() -> None:
    """A request that says otherwise has its way."""
    with serving(return_tokens_as_token_ids=True) as server:
        for wish, token in ((None, "token_id:104"), (False, "h"), (True, "token_id:104")):
            [choice] = choices(server, prompt="h", logprobs=0, return_tokens_as_token_ids=wish)
            assert choice["logprobs"]["tokens"][0] == token


# ------------------------------------------------------------------------------------ the answers


def test_special_tokens_show_on_request(server: HttpServer) -> None:
    """The text of the end token, if stop tokens are kept too."""
    fields: dict[str, Any] = {"skip_special_tokens": False, "include_stop_str_in_output": True}

    assert choices(server, prompt="a", **fields)[0]["text"] == "a</s>"
    assert choices(server, prompt="a")[0]["text"] == "a"


def test_bad_words_travel_as_tokens_with_and_without_a_space(server: HttpServer) -> None:
    """A word at the start of a text and behind a space; what is all space stays what it is."""
    choices(server, prompt="x", bad_words=["ab", " c", "\n"])

    params = only_request(server).sampling_params
    assert params is not None
    assert params.bad_words_token_ids == tuple(
        tuple(word) for word in (b"ab", b"c", b"\n", b" ab", b" c", b" \n")
    )


def test_repetition_detection_has_vllms_defaults(server: HttpServer) -> None:
    """A size of 0 is none, or one."""
    choices(server, prompt="x", repetition_detection={})
    choices(server, prompt="x", repetition_detection={"max_pattern_size": 3, "min_pattern_size": 0})

    off, on = (request.sampling_params for request in server.engine.received)
    assert off is not None
    assert on is not None
    assert off.repetition_detection is None
    assert on.repetition_detection is not None
    assert on.repetition_detection.min_pattern_size == 1


def test_seed_of_minus_one_is_none(server: HttpServer) -> None:
    """As in vLLM."""
    choices(server, prompt="x", seed=-1)

    params = only_request(server).sampling_params
    assert params is not None
    assert params.seed is None


def lettered_answers(letters: str) -> Any:
    """Continuation k of a prompt is letter k, twice: later letters are less likely."""

    def answer(request: EngineCoreRequest) -> list[int]:
        return [ord(letters[int(request.request_id.rpartition("-")[2])])] * 2

    return answer


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_shows_the_likeliest(server: HttpServer, logprobs: int | None) -> None:
    """Of each prompt, best first; all that were made are counted."""
    server.engine.answer = lettered_answers("cadb")
    fields: dict[str, Any] = {"max_tokens": 2, "logprobs": logprobs}

    body = server.complete(prompt=["x", "yy"], n=2, best_of=4, **fields).json()

    assert [choice["text"] for choice in body["choices"]] == ["aa", "bb"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 16)
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in body["choices"])


def test_best_of_in_a_chat(server: HttpServer) -> None:
    """OpenAI has it for completions only; here both routes do."""
    server.engine.answer = lettered_answers("cab")

    assert content(chat(server, best_of=3, max_tokens=2)) == "aa"


def test_best_of_equal_to_n_is_what_n_is(server: HttpServer) -> None:
    """Some clients always send it; it may be streamed then."""
    server.engine.answer = lettered_answers("cab")

    chunks = events(server.complete(prompt="x", n=3, best_of=3, max_tokens=2, stream=True))

    texts = [
        "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)
        for index in range(3)
    ]
    assert texts == ["cc", "aa", "bb"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_beam_search_finds_the_likeliest_answers(server: HttpServer, is_streamed: bool) -> None:
    """Where a, b, c … have -0.5, -1.5, -2.5 … at each place: best first, with the right sums, and
    nothing random about it."""
    response = server.complete(
        prompt=["x", "yy"],
        n=3,
        use_beam_search=True,
        max_tokens=2,
        logprobs=1,
        stream=is_streamed,
        **({"stream_options": {"include_usage": True}} if is_streamed else {}),
    )

    assert response.status_code == 200, response.text
    parts = events(response) if is_streamed else [response.json()]
    found = sorted((c for part in parts for c in part["choices"]), key=lambda c: c["index"])
    assert [choice["text"] for choice in found] == ["aa", "ab", "ba"] * 2
    assert [choice["finish_reason"] for choice in found] == ["length"] * 6
    assert found[2]["logprobs"]["token_logprobs"] == pytest.approx([-1.5, -0.5])
    assert found[2]["logprobs"]["top_logprobs"] == [
        pytest.approx({"b": -1.5, "a": -0.5}),
        pytest.approx({"a": -0.5}),
    ]
    usage = parts[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)
    assert all(p.sampling_params.max_tokens == 1 for p in server.engine.received)  # type: ignore[union-attr]


def test_beam_search_counts_as_its_answers(server: HttpServer) -> None:
    """In the metrics; the steps between them do not."""
    ended = 'raywire:request_success_total{engine="0",finished_reason="length",model_name="m"}'
    before = server.metric(ended)

    choices(server, prompt="x", n=3, use_beam_search=True, max_tokens=4)

    assert server.metric(ended) - before == 3


def test_beam_search_ends_where_a_token_ends_it(server: HttpServer) -> None:
    """A stop token is named, and its text is left out, as everywhere."""
    answer = chat(server, n=2, use_beam_search=True, max_tokens=3, stop_token_ids=[97])

    first = answer["choices"][0]
    assert (first["message"]["content"], first["finish_reason"]) == ("", "stop")
    assert first["stop_reason"] == 97


def test_client_that_goes_ends_its_beam_search(server: HttpServer) -> None:
    """Nothing of it is left on the engine, and the next request is served."""
    server.engine.is_paused = True
    try:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                "/v1/completions",
                json={"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 500},
                timeout=0.3,
            )
        server.wait_idle()
    finally:
        server.engine.is_paused = False
    assert choices(server, prompt="ok")[0]["text"] == "ok"


def test_stream_comes_in_larger_pieces(server: HttpServer) -> None:
    """The first and the last at once, four tokens together between them, and nothing is lost."""
    server.engine.answer = text_as_answer("abcdefghijkl")
    server.engine.step_s = 0.002
    fields: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 20, "logprobs": 0}
    try:
        chunks = events(server.complete(**fields, stream_interval=4, return_token_ids=True))
    finally:
        server.engine.step_s = 0.0

    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == "abcdefghijkl"
    assert parts[-1]["finish_reason"] == "stop"
    sizes = [len(part["token_ids"]) for part in parts]
    assert all(size >= 4 for size in sizes[1:-1])
    assert sum(sizes) == 13
    assert sizes == [len(part["logprobs"]["tokens"]) for part in parts]


# ---------------------------------------------------------------------------------- names and order


def test_answer_carries_the_clients_name_for_it(server: HttpServer) -> None:
    """Behind the usual prefix; two requests of one name are two for the engine."""
    answers = [server.complete(prompt="x", request_id="mine-7").json() for _ in range(2)]

    assert [answer["id"] for answer in answers] == ["cmpl-mine-7"] * 2
    assert chat(server, request_id="mine-8")["id"] == "chatcmpl-mine-8"
    assert len({request.request_id for request in server.engine.received}) == 3


def test_priority_reaches_the_engine(server: HttpServer) -> None:
    """Where the server heeds it; elsewhere it is refused."""
    choices(server, prompt="x", priority=-5)

    assert only_request(server).priority == -5


def test_session_in_the_body_comes_before_the_header() -> None:
    """Requests of one session go to one rank, however the name comes."""
    with serving(num_engines=2) as server:
        routes = [
            server.http.post(
                "/v1/completions",
                json={"prompt": f"prompt {i}", "session_id": "s-1"},
                headers={"x-session-id": f"other-{i}"},
            ).headers["x-raywire-route"]
            for i in range(4)
        ]

    assert len({route.partition(";")[0] for route in routes}) == 1
    assert all("rule=session" in route for route in routes[1:])

"""POST /v1/completions, whole and streamed, with computed answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_engine import prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, events, serving


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose answer to a prompt is the prompt; tests may change that."""
    shared.engine.answer = prompt_as_answer
    shared.engine.num_cached_tokens = 0
    return shared


def choices(server: HttpServer, **fields: Any) -> list[dict[str, Any]]:
    response = server.complete(**fields)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_completion_has_openai_shape(server: HttpServer) -> None:
    """All keys that clients look for, and the numbers right."""
    body = server.complete(prompt="hello").json()

    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_default_is_16_tokens(server: HttpServer) -> None:
    """As in OpenAI's reference; the finish reason says that it was cut."""
    [choice] = choices(server, prompt="x" * 40)

    assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")


def test_default_is_cut_to_the_models_length(server: HttpServer) -> None:
    """A prompt that leaves room for fewer than 16 tokens is still answered."""
    [choice] = choices(server, prompt="x" * 995)

    assert (choice["text"], choice["finish_reason"]) == ("x" * 5, "length")


def test_streamed_text_is_the_whole_text(server: HttpServer) -> None:
    """Chunk by chunk, with one finish reason, no empty chunk before it, and `[DONE]` at the end."""
    response = server.complete(prompt="héllo wörld", max_tokens=30, stream=True)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = events(response)
    assert joined(chunks) == "héllo wörld"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["text"] == ""] in (
        [],
        ["stop"],
    )
    check_chunks(chunks, num_choices=1)


def check_chunks(chunks: list[Any], num_choices: int) -> None:
    """Every chunk has the key; each index gets exactly one reason, in its last chunk."""
    reasons: dict[int, list[str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert sorted(reasons) == list(range(num_choices))
    for of_one in reasons.values():
        assert of_one[-1] is not None
        assert of_one[:-1] == [None] * (len(of_one) - 1)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stop_string_that_never_comes_changes_nothing(server: HttpServer) -> None:
    """Text is held back only while it may become a stop string, and no chunk is empty."""
    plain = events(server.complete(prompt="a@b@@c", max_tokens=30, stream=True))

    watched = events(
        server.complete(prompt="a@b@@c", max_tokens=30, stream=True, stop=["@@never-there@@"])
    )

    assert joined(watched) == joined(plain) == "a@b@@c"
    assert all(c["choices"][0]["text"] or c["choices"][0]["finish_reason"] for c in watched)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_string_ends_the_text_and_the_request(server: HttpServer, is_streamed: bool) -> None:
    """It is left out by default, named in `stop_reason`, and the engine stops at once."""
    server.engine.answer = text_as_answer("one X2 two X1 three" * 20)
    server.engine.aborted.clear()
    fields = {"prompt": "p", "max_tokens": 400, "stop": ["X1", "X2"], "stream": is_streamed}

    response = server.complete(**fields)

    parts = events(response) if is_streamed else [response.json()]
    assert joined(parts) == "one "
    last = parts[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "X2")
    server.wait_idle()
    assert len(server.engine.aborted) == 1


def test_stop_string_is_kept_on_request(server: HttpServer) -> None:
    """With `include_stop_str_in_output` the text ends with it."""
    server.engine.answer = text_as_answer("one X2 two")

    [choice] = choices(server, prompt="p", stop="X2", include_stop_str_in_output=True)

    assert (choice["text"], choice["stop_reason"]) == ("one X2", "X2")


def test_stop_token_id_is_named(server: HttpServer) -> None:
    """`stop_reason` is the id; the model's own end token is none."""
    [choice] = choices(server, prompt="abc", stop_token_ids=[ord("b")])

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("b"))
    assert choices(server, prompt="abc")[0]["stop_reason"] is None


@pytest.mark.parametrize("prompt", [["a", "bb", "ccc"], [[97], [98, 98], [99, 99, 99]]])
def test_batch_of_prompts_times_n(server: HttpServer, prompt: list[Any]) -> None:
    """Choice k of prompt p has index p * n + k; usage sums outputs and counts each prompt once."""
    body = server.complete(prompt=prompt, n=2).json()

    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["a", "a", "bb", "bb", "ccc", "ccc"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 18)


def test_batch_streams_every_index(server: HttpServer) -> None:
    """The same texts, each under its own index."""
    chunks = events(server.complete(prompt=["a", "bb"], n=2, stream=True))

    check_chunks(chunks, num_choices=4)
    assert [joined(chunks, i) for i in range(4)] == ["a", "a", "bb", "bb"]


def test_continuations_draw_from_seeds_that_follow_each_other(server: HttpServer) -> None:
    """Or n answers to a seeded request would be one answer n times."""
    server.engine.received.clear()
    server.complete(prompt="x", n=3, seed=7)

    params = [request.sampling_params for request in server.engine.received]
    assert [p.seed for p in params if p is not None] == [7, 8, 9]


def test_usage_chunk_comes_only_when_asked_for(server: HttpServer) -> None:
    """Without `include_usage` no chunk has a usage; continuous usage alone asks for nothing."""
    for options in (None, {"continuous_usage_stats": True}, {"include_usage": False}):
        chunks = events(server.complete(prompt="abc", stream=True, stream_options=options))
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_chunk_is_the_last_and_equals_the_plain_answers(server: HttpServer) -> None:
    """It has no choices; all others have a null usage, as the reference says."""
    plain = server.complete(prompt="abc").json()["usage"]

    chunks = events(
        server.complete(prompt="abc", stream=True, stream_options={"include_usage": True})
    )

    assert (chunks[-1]["usage"], chunks[-1]["choices"]) == (plain, [])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_running_usage_with_n_sums_and_only_grows(server: HttpServer) -> None:
    """The shared prompt counts once; the last equals the plain answer's."""
    plain = server.complete(prompt="abcd", n=2).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = events(server.complete(prompt="abcd", n=2, stream=True, stream_options=options))

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {4}
    assert chunks[-1]["usage"] == plain


@pytest.mark.parametrize("num_cached", [0, 16])
def test_cached_tokens_are_always_there(server: HttpServer, num_cached: int) -> None:
    """On a miss as on a hit, plain and streamed, and `prompt_tokens` stays what it is."""
    server.engine.num_cached_tokens = num_cached
    plain = server.complete(prompt="x" * 20).json()["usage"]
    options = {"include_usage": True}

    chunks = events(server.complete(prompt="x" * 20, stream=True, stream_options=options))

    assert plain["prompt_tokens_details"] == {"cached_tokens": num_cached}
    assert plain["prompt_tokens"] == 20
    assert chunks[-1]["usage"] == plain


def test_logprobs_have_the_legacy_shape(server: HttpServer) -> None:
    """Four arrays of one length; the chosen token is among the top ones."""
    [choice] = choices(server, prompt="hé", logprobs=2)

    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "</s>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == pytest.approx([-10.4, -19.5, -16.9, -25.6], rel=1e-4)
    assert logprobs["top_logprobs"][0] == pytest.approx({"h": -10.4, "a": -0.5, "b": -1.5})


def test_logprobs_zero_is_the_sampled_token_alone(server: HttpServer) -> None:
    """0 is a number, not a no."""
    [choice] = choices(server, prompt="h", logprobs=0)

    assert choice["logprobs"]["top_logprobs"][0] == pytest.approx({"h": -10.4})


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_joined_are_the_plain_ones(server: HttpServer, echo: bool) -> None:
    """Offsets go on over the chunks."""
    fields = {"prompt": "hé wörld", "logprobs": 1, "echo": echo}
    [plain] = choices(server, **fields)

    chunks = events(server.complete(**fields, stream=True))

    for name, values in plain["logprobs"].items():
        parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks]
        assert [value for part in parts for value in part] == values
    assert joined(chunks) == plain["text"]


@pytest.mark.parametrize("includes", [False, True])
def test_stop_string_leaves_offsets_where_tokens_begin(server: HttpServer, includes: bool) -> None:
    """In the text as the model wrote it, of which a stop string is the end; streamed the same."""
    server.engine.answer = text_as_answer("one X2 two")
    fields = {"prompt": "p", "logprobs": 0, "stop": ["X2", "X2 t"]}
    fields |= {"include_stop_str_in_output": includes, "return_token_ids": True}

    response = server.complete(**fields)
    chunks = events(server.complete(**fields, stream=True))

    [plain] = response.json()["choices"]
    assert plain["text"] == ("one X2" if includes else "one ")
    assert "".join(plain["logprobs"]["tokens"]) == bytes(plain["token_ids"]).decode() == "one X2"
    assert plain["logprobs"]["text_offset"] == list(range(6))
    assert response.json()["usage"]["completion_tokens"] == 6
    for name, values in plain["logprobs"].items():
        assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]] == values


def test_cached_tokens_count_once_for_each_prompt(server: HttpServer) -> None:
    """However many answers it gets: like `prompt_tokens`, whose part they are."""
    server.engine.num_cached_tokens = 16

    usage = server.complete(prompt=["x" * 20, "y" * 30], n=3).json()["usage"]

    assert usage["prompt_tokens"] == 50
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_echo_puts_the_prompt_first(server: HttpServer) -> None:
    """As text, also for a prompt of token ids; nothing comes before the first token."""
    [choice] = choices(server, prompt=[104, 105], echo=True, logprobs=1)

    assert choice["text"] == "hihi"
    assert choice["logprobs"]["tokens"] == ["h", "i", "h", "i", "</s>"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_without_new_tokens(server: HttpServer, is_streamed: bool) -> None:
    """`max_tokens` 0 asks for the prompt's log probabilities; evaluators do."""
    response = server.complete(prompt="hi", echo=True, logprobs=1, max_tokens=0, stream=is_streamed)

    parts = events(response) if is_streamed else [response.json()]
    assert joined(parts) == "hi"
    assert [t for part in parts for t in part["choices"][0]["logprobs"]["tokens"]] == ["h", "i"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    if not is_streamed:
        assert parts[0]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_vllms_shape(server: HttpServer) -> None:
    """By token id; none for the first token."""
    [choice] = choices(server, prompt="hi", prompt_logprobs=1)

    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["105"] == {"logprob": pytest.approx(-10.5), "rank": 1, "decoded_token": "i"}
    assert second["97"]["decoded_token"] == "a"


def test_token_ids_on_request(server: HttpServer) -> None:
    """Of prompt and output, whole and streamed."""
    [choice] = choices(server, prompt="hi", return_token_ids=True)
    chunks = events(server.complete(prompt="hi", return_token_ids=True, stream=True))

    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], [104, 105, 256])
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == [104, 105, 256]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [104, 105]


def test_unknown_fields_are_ignored_and_reported(server: HttpServer) -> None:
    """By harmless names only; hints and empty values of unserved fields are no reason to warn."""
    response = server.complete(
        prompt="x", temprature=1, **{"bad\nname": 2}, user="me", tools=[], suffix=None
    )

    assert response.status_code == 200
    assert response.headers["x-raywire-ignored"] == "temprature,?,tools"


def test_unknown_fields_inside_of_others_are_reported(server: HttpServer) -> None:
    """By their path. A misspelt option would be thought to have had its effect."""
    schema = {"type": "object"}
    for field, value, path in (
        ("stream_options", {"include_usages": True}, "stream_options.include_usages"),
        ("repetition_detection", {"max_size": 2}, "repetition_detection.max_size"),
        (
            "structured_outputs",
            {"json": schema, "disable_any_whitespce": True},
            "structured_outputs.disable_any_whitespce",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "stric": True}},
            "response_format.json_schema.stric",
        ),
    ):
        response = server.complete(prompt="x", stream=True, temprature=1, **{field: value})
        assert response.status_code == 200, response.text
        assert response.headers["x-raywire-ignored"] == f"temprature,{path}"


def test_known_fields_leave_no_warning(server: HttpServer) -> None:
    """The header is there only where something was ignored."""
    response = server.complete(
        prompt="x",
        user="me",
        metadata={"a": "b"},
        response_format={"type": "text"},
        best_of=1,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": False},
    )

    assert response.status_code == 200
    assert "x-raywire-ignored" not in response.headers


def test_null_is_the_same_as_leaving_out(server: HttpServer) -> None:
    """Clients send null for everything they have no value for."""
    names = ("temperature", "top_p", "n", "seed", "stop", "logprobs", "stream", "stream_options")

    [choice] = choices(server, prompt="abc", **dict.fromkeys(names))

    assert choice["text"] == "abc"


def test_parameters_reach_the_engine(server: HttpServer) -> None:
    """Each one by its name, and no text among them."""
    server.engine.received.clear()
    choices(
        server,
        prompt="x",
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.75,
        logit_bias={"97": -3},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        allowed_token_ids=[1, 2],
        repetition_detection={"max_pattern_size": 3},
        cache_salt="pepper",
        stop=["zz"],
    )

    [request] = server.engine.received
    params = request.sampling_params
    assert params is not None
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.25)
    assert (params.frequency_penalty, params.logit_bias) == (0.75, {97: -3.0})
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (5, 2, True)
    assert (params.stop_token_ids, params.allowed_token_ids) == ((5,), (1, 2))
    assert params.repetition_detection is not None
    assert params.repetition_detection.max_pattern_size == 3
    assert params.eos_token_ids == (256,)
    assert request.cache_salt == "pepper"


@pytest.mark.parametrize(("split", "num_tokens"), [(None, 1), (False, 1), (True, 4)])
def test_special_token_in_a_prompt_is_one_unless_asked_otherwise(
    server: HttpServer, split: bool | None, num_tokens: int
) -> None:
    """Whoever writes the whole prompt writes its special tokens; the echo has them as written."""
    fields = {"prompt": "x</s>", "split_special_tokens": split, "echo": True, "max_tokens": 1}

    body = server.complete(**fields).json()

    assert body["usage"]["prompt_tokens"] == 1 + num_tokens
    assert body["choices"][0]["text"] == "x</s>x"

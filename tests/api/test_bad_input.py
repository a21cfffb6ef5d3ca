"""Bad requests: a 4xx in OpenAI's shape that names the field, and the engine never sees them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.http_server import HttpServer, serving
from tests.helpers.processor_time import within

LONG = 10**400


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server
        # None of the requests below has reached the engine, and it serves the next one.
        assert server.engine.received == []
        assert server.complete(prompt="ok").json()["choices"][0]["text"] == "ok"


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "x", **fields}).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return "/v1/chat/completions", json.dumps(body).encode()


def raw(body: str | bytes) -> tuple[str, bytes]:
    return "/v1/completions", body.encode() if isinstance(body, str) else body


def message(**fields: Any) -> tuple[str, bytes]:
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "user", **fields}])


def calls(*tool_calls: Any) -> tuple[str, bytes]:
    return message(role="assistant", content=None, tool_calls=tool_calls)


def call(type: str = "function", **function: Any) -> dict[str, Any]:
    return {"id": "1", "type": type, "function": {"name": "f", **function}}


def tool(type: str = "function", **function: Any) -> dict[str, Any]:
    return {"type": type, "function": {"name": "f", **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: list[tuple[tuple[str, bytes], int, str | None, str]] = [
    # Prompts: empty, mixed, of wrong types, too long, out of the vocabulary.
    (raw("{}"), 400, "prompt", "required"),
    (completion(prompt=None), 400, "prompt", "required"),
    (completion(prompt=7), 400, "prompt", "required"),
    (completion(prompt=""), 400, "prompt", "empty"),
    (completion(prompt=[]), 400, "prompt", "empty"),
    (completion(prompt=[""]), 400, "prompt", "empty"),
    (completion(prompt=[[]]), 400, "prompt", "empty"),
    (completion(prompt=["a", ""]), 400, "prompt", "empty"),
    (completion(prompt=["a", []]), 400, "prompt", "empty"),
    (completion(prompt=["a", 7]), 400, "prompt[1]", "text or a list"),
    (completion(prompt=["a", [1, "b"]]), 400, "prompt[1][1]", "expected int"),
    (completion(prompt=[[1], {"a": 1}]), 400, "prompt[1]", "text or a list"),
    (completion(prompt=[1, "a"]), 400, "prompt[1]", "expected int"),
    (completion(prompt=[1.5]), 400, "prompt[0]", "expected int"),
    (completion(prompt=[True]), 400, "prompt[0]", "expected int"),
    (completion(prompt=[-1]), 400, "prompt", "-1"),
    (completion(prompt=[300]), 400, "prompt", "0 to 299"),
    (completion(prompt=[2**31]), 400, "prompt", "0 to 299"),
    (completion(prompt=[2**64]), 400, "prompt", "0 to 299"),
    (completion(prompt="x" * 1000), 400, "prompt", "1000 tokens"),
    (completion(prompt="x" * 990, max_tokens=11), 400, "prompt", "lower max_tokens to 10"),
    (completion(prompt=["x"] * 1025), 400, "prompt", "1024"),
    (completion(prompt=[[1]] * 1025), 400, "prompt", "1024"),
    (completion(prompt=["x", [1]] * 513), 400, "prompt", "1024"),
    (completion(prompt=[1] * 1000), 400, "prompt", "1000 tokens"),
    (completion(unknown="y" * (3 << 20)), 400, None, "besides prompt"),
    # Not JSON, or not an object.
    (raw(""), 400, None, "JSON"),
    (raw("not json"), 400, None, "JSON"),
    (raw('{"prompt": "x"'), 400, None, "JSON"),
    (raw('{"prompt": "x"} trailing'), 400, None, "JSON"),
    (raw("[1]"), 400, None, "object"),
    (raw('"text"'), 400, None, "object"),
    (raw("null"), 400, None, "object"),
    (raw(b"\xef\xbb\xbf{}"), 400, None, "JSON"),
    (raw('{"prompt": "x"}'.encode("utf-16")), 400, None, "JSON"),
    (raw(b'{"prompt": "\xff"}'), 400, "prompt", "JSON"),
    (raw('{"prompt": [1, NaN]}'), 400, "prompt", "NaN"),
    (raw(r'{"prompt": "\ud800"}'), 400, None, "JSON"),
    (raw('{"x": ' + "[" * 10_000), 400, None, "nested"),
    (raw("{" + '"x": {' * 10_000), 400, None, "nested"),
    # Numbers that are none, too large, or out of bounds.
    (raw('{"prompt": "x", "temperature": NaN}'), 400, "temperature", "NaN"),
    (raw('{"prompt": "x", "temperature": Infinity}'), 400, "temperature", "Infinity"),
    (raw('{"prompt": "x", "temperature": 1e999}'), 400, "temperature", "out of range"),
    (raw('{"prompt": "x", "top_p": NaN}'), 400, "top_p", "NaN"),
    (raw('{"prompt": "x", "min_p": -Infinity}'), 400, "min_p", "NaN"),
    (raw('{"prompt": "x", "presence_penalty": 1e999}'), 400, "presence_penalty", "out of range"),
    (raw('{"prompt": "x", "logit_bias": {"5": NaN}}'), 400, "logit_bias", "NaN"),
    (completion(temperature=-0.1), 400, "temperature", "from 0"),
    (completion(temperature=True), 400, "temperature", "bool"),
    (completion(temperature="1"), 400, "temperature", "expected float"),
    (completion(top_p=0), 400, "top_p", "above 0"),
    (completion(top_p=1.1), 400, "top_p", "from 0"),
    (completion(top_k=-2), 400, "top_k", "from -1"),
    (completion(top_k=2**31), 400, "top_k", "from -1"),
    (completion(min_p=1.1), 400, "min_p", "from 0"),
    (completion(presence_penalty=2.1), 400, "presence_penalty", "from -2"),
    (completion(frequency_penalty=-2.1), 400, "frequency_penalty", "from -2"),
    (completion(repetition_penalty=0), 400, "repetition_penalty", "from 0.01"),
    (completion(seed=2**63), 400, "seed", "from -"),
    (completion(seed=1.5), 400, "seed", "expected int"),
    (completion(max_tokens=0), 400, "max_tokens", "from 1"),
    (completion(max_tokens=-5), 400, "max_tokens", "from 1"),
    (completion(max_tokens=True), 400, "max_tokens", "expected int"),
    (completion(max_tokens=1.5), 400, "max_tokens", "expected int"),
    (completion(max_tokens=2**63), 400, "max_tokens", "from 1"),
    (raw(f'{{"prompt": "x", "max_tokens": {LONG}}}'), 400, "max_tokens", "from 1"),
    (completion(min_tokens=-1), 400, "min_tokens", "from 0"),
    (completion(min_tokens=17), 400, "min_tokens", "above max_tokens"),
    (completion(priority=1), 400, "priority", "scheduling-policy"),
    (completion(priority=2**31), 400, "priority", "from -"),
    # Lists of ids, biases, strings.
    (completion(stop_token_ids=[-1]), 400, "stop_token_ids", "-1"),
    (completion(stop_token_ids=[300]), 400, "stop_token_ids", "end at 299"),
    (completion(stop_token_ids=[True]), 400, "stop_token_ids[0]", "expected int"),
    (completion(stop_token_ids=[2**63]), 400, "stop_token_ids", "no token id"),
    (completion(stop_token_ids=list(range(65))), 400, "stop_token_ids", "64"),
    (completion(allowed_token_ids=[]), 400, "allowed_token_ids", "empty"),
    (completion(allowed_token_ids=[300]), 400, "allowed_token_ids", "end at 299"),
    (completion(logit_bias={"x": 1}), 400, "logit_bias", "expected int"),
    (completion(logit_bias={"5": 101}), 400, "logit_bias", "from -100"),
    (completion(logit_bias={"300": 1}), 400, "logit_bias", "end at 299"),
    (completion(logit_bias=dict.fromkeys(range(1025), 1)), 400, "logit_bias", "1024"),
    (completion(stop=7), 400, "stop", "expected str"),
    (completion(stop=[7]), 400, "stop[0]", "expected str"),
    (completion(stop=[""]), 400, "stop", "1 to 256"),
    (completion(stop=["y" * 257]), 400, "stop", "1 to 256"),
    (completion(stop=["y"] * 17), 400, "stop", "16"),
    (completion(repetition_detection={"max_pattern_size": 257}), 400, None, "from 1 to 256"),
    (completion(repetition_detection={"max_pattern_size": 2, "min_count": 1}), 400, None, "from 2"),
    (completion(bad_words=[""]), 400, "bad_words", "1 to 256"),
    (completion(bad_words=["y" * 257]), 400, "bad_words", "1 to 256"),
    (completion(bad_words=["y"] * 513), 400, "bad_words", "512"),
    (completion(bad_words=[f"{i}" for i in range(512)]), 400, "bad_words", "1024 sequences"),
    (completion(bad_words=[[]] * 1000), 400, "bad_words[0]", "expected str"),
    (completion(bad_words="x"), 400, "bad_words", "expected array"),
    # How many sequences.
    (completion(n=0), 400, "n", "from 1 to 128"),
    (completion(n=129), 400, "n", "from 1 to 128"),
    (completion(n=100_000), 400, "n", "from 1 to 128"),
    (chat(n=129), 400, "n", "from 1 to 128"),
    (completion(prompt=["x"] * 64, n=128), 400, "n", "8192 sequences"),
    (completion(best_of=0), 400, "best_of", "from 1 to 128"),
    (completion(n=3, best_of=2), 400, "best_of", "from 3 to 128"),
    (completion(best_of=129), 400, "best_of", "from 1 to 128"),
    (completion(best_of=2, stream=True), 400, "best_of", "streamed"),
    (completion(prompt=["x"] * 64, best_of=128), 400, "n", "8192 sequences"),
    # Beam search.
    (completion(use_beam_search=True, n=11), 400, "n", "from 1 to 10"),
    (completion(prompt=["x"] * 13, use_beam_search=True, n=10), 400, "n", "130 beams"),
    (completion(use_beam_search=True, length_penalty=11), 400, "length_penalty", "to 10"),
    (completion(length_penalty=2), 400, "length_penalty", "needs use_beam_search"),
    (completion(use_beam_search=True, stop="a"), 400, "stop", "no effect"),
    (completion(use_beam_search=True, bad_words=["a"]), 400, "bad_words", "no effect"),
    (completion(use_beam_search=True, logit_bias={"1": 1}), 400, "logit_bias", "no effect"),
    (completion(use_beam_search=True, best_of=2), 400, "best_of", "no effect"),
    (completion(use_beam_search=True, min_tokens=2), 400, "min_tokens", "no effect"),
    (chat(use_beam_search=True, presence_penalty=1), 400, "presence_penalty", "no effect"),
    (chat(use_beam_search=1), 400, "use_beam_search", "expected bool"),
    # Names, cuts, pieces.
    (completion(request_id=""), 400, "request_id", "1 to 128"),
    (completion(request_id="y" * 129), 400, "request_id", "1 to 128"),
    (completion(request_id="a\nb"), 400, "request_id", "1 to 128"),
    (completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "from 1 to 1000"),
    (completion(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "from 1 to 1000"),
    (completion(truncate_prompt_tokens=1001), 400, "truncate_prompt_tokens", "from 1 to 1000"),
    (chat(truncate_prompt_tokens=1001), 400, "truncate_prompt_tokens", "from 1 to 1000"),
    (completion(truncation_side="left"), 400, "truncation_side", "needs truncate"),
    (completion(truncation_side="up"), 400, "truncation_side", "up"),
    (completion(stream_interval=0), 400, "stream_interval", "from 1"),
    # Log probabilities.
    (completion(logprobs=21), 400, "logprobs", "from 0 to 20"),
    (completion(logprobs=True), 400, "logprobs", "expected int"),
    (completion(prompt_logprobs=10**6), 400, "prompt_logprobs", "from 0 to 20"),
    (completion(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "stream"),
    (completion(logprob_token_ids=[1]), 400, "logprob_token_ids", "needs logprobs"),
    (completion(logprobs=0, echo=True, max_tokens=0, logprob_token_ids=[1]), 400, None, "new tok"),
    (chat(logprob_token_ids=[1]), 400, "logprob_token_ids", "needs logprobs"),
    (completion(logprobs=0, logprob_token_ids=[300]), 400, "logprob_token_ids", "end at 299"),
    (completion(logprobs=0, logprob_token_ids=[-1]), 400, "logprob_token_ids", "no token id"),
    (completion(logprobs=0, logprob_token_ids=[1] * 129), 400, "logprob_token_ids", "128"),
    (chat(logprobs=1), 400, "logprobs", "expected bool"),
    (chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "from 0 to 20"),
    # Combinations.
    (completion(stream_options={"include_usage": True}), 400, "stream_options", "needs stream"),
    (completion(stream=1), 400, "stream", "expected bool"),
    (completion(cache_salt=""), 400, "cache_salt", "1 to 256"),
    (completion(cache_salt="y" * 257), 400, "cache_salt", "1 to 256"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens", "differ"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens", "from 1"),
    (chat(max_completion_tokens=1000), 400, "messages", "lower max_tokens"),
    (chat(add_generation_prompt=True, continue_final_message=True), 400, None, "exclude"),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "messages"),
    (chat(chat_template_kwargs={"chat_template": "x"}), 400, None, "must not set chat_template"),
    (chat(documents="x"), 400, "documents", "expected array"),
    (chat(documents=[{"text": 1}]), 400, None, "documents[0]"),
    (chat(documents=[{"text": "y" * (2 << 20)}]), 400, "documents", "bytes"),
    (chat(reasoning_effort="huge"), 400, "reasoning_effort", "huge"),
    (chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs", "self"),
    (chat(chat_template_kwargs=[]), 400, "chat_template_kwargs", "expected object"),
    (chat(chat_template_kwargs={"a": "y" * 70_000}), 400, "chat_template_kwargs", "65536"),
    # Messages.
    (raw("{}"), 400, "prompt", "required"),
    (chat(messages=None), 400, "messages", "expected array"),
    (chat(messages=[]), 400, "messages", "empty"),
    (chat(messages="hi"), 400, "messages", "expected array"),
    (chat(messages=["hi"]), 400, "messages[0]", "expected object"),
    (chat(messages=[{"content": "x"}]), 400, "messages[0].role", "string"),
    (chat(messages=[{"role": 1, "content": "x"}]), 400, "messages[0].role", "string"),
    (chat(messages=[{"role": "user", "content": "x"}] * 4097), 400, "messages", "4096"),
    (message(content=None), 400, "messages[1].content", "text"),
    (message(content=7), 400, "messages[1].content", "text"),
    (message(content=[]), 400, "messages[1].content", "text"),
    (message(content=[7]), 400, "messages[1].content[0]", "object"),
    (message(content=["x"] * 4097), 400, "messages[1].content", "4096"),
    (message(content="x", junk="y" * 70_000), 400, "messages[1]", "65536 bytes"),
    (message(content=[{"type": "text", "text": "x", "y": "z" * 70_000}]), 400, None, "65536"),
    (message(content=[{"type": "text"}]), 400, "messages[1].content[0].text", "string"),
    (message(role="robot", content="x"), 400, "messages", "robots may not speak"),
    # Earlier calls of tools.
    (calls({"id": "1"}), 400, "messages[1].tool_calls[0]", "function"),
    (calls({"function": {}}), 400, "messages[1].tool_calls[0].function", "name"),
    (calls({"function": {"name": 1}}), 400, "messages[1].tool_calls[0].function.name", "str"),
    (calls(call(type="custom")), 400, "messages[1].tool_calls[0].type", "custom"),
    (calls(call(arguments=[1])), 400, None, "arguments: expected"),
    (calls("f"), 400, "messages[1].tool_calls[0]", "object"),
    (calls(*[call()] * 4097), 400, "messages[1].tool_calls", "4096"),
    (calls(*[call(name="y" * 1000)] * 100), 400, None, "65536 bytes"),
    (message(content="x", tool_calls=[call()]), 400, "messages[1].tool_calls", "assistant"),
    (message(role="assistant", content=None, tool_calls=[]), 400, "messages[1].content", "text"),
    # Tools: malformed, too many, too large, and choices that nothing can grant.
    (chat(tools="f"), 400, "tools", "expected array"),
    (chat(tools=[7]), 400, "tools[0]", "expected object"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0]", "function"),
    (chat(tools=[tool(type="custom")]), 400, "tools[0].type", "custom"),
    (chat(tools=[tool(name=None)]), 400, "tools[0].function.name", "expected str"),
    (chat(tools=[tool(name="")]), 400, "tools[0].function.name", "1 to 256"),
    (chat(tools=[tool(name="y" * 257)]), 400, "tools[0].function.name", "1 to 256"),
    (chat(tools=[tool(parameters="{}")]), 400, "tools[0].function.parameters", "object"),
    (chat(tools=[tool()] * 5000), 400, "tools", "1024 are the most"),
    (chat(tools=[tool(description="y" * (1 << 20))]), 400, "tools", "bytes"),
    (chat(tools=[tool(parameters={"x": [[]] * 70_000})]), 400, "tools", "values"),
    (chat(tools=[tool()], parallel_tool_calls=1), 400, "parallel_tool_calls", "expected bool"),
    (chat(tools=[tool()], tool_choice="any"), 400, "tool_choice", "must be auto, none"),
    (chat(tools=[tool()], tool_choice=7), 400, "tool_choice", "expected"),
    (chat(tools=[tool()], tool_choice=named("g")), 400, "tool_choice", "no tool 'g'"),
    (chat(tool_choice="required"), 400, "tool_choice", "needs tools"),
    (chat(tool_choice=named("f")), 400, "tool_choice", "no tool 'f'"),
    # Unknown model and route.
    (completion(model="gpt-4"), 404, "model", "gpt-4"),
    (chat(model="gpt-4"), 404, "model", "gpt-4"),
    (completion(model=7), 400, "model", "expected str"),
    (("/v1/nothing", b"{}"), 404, None, "no route"),
]


@pytest.mark.row("S-19", "S-21", "S-52", "S-53", "F-33", "F-35", "F-36", "F-37", "F-39")
@pytest.mark.parametrize(("request_", "status", "param", "words"), BAD)
def test_bad_request_is_refused_by_name(
    server: HttpServer, request_: tuple[str, bytes], status: int, param: str | None, words: str
) -> None:
    """Each violation is a 4xx that names the field and says what is wrong with it."""
    path, body = request_

    headers = {"content-type": "application/json"}
    response = within(0.2, lambda: server.http.post(path, content=body, headers=headers))

    error = check_shape(response, status)
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.row("F-39")
def test_of_two_fields_of_one_name_the_last_counts(server: HttpServer) -> None:
    """As in Python and JavaScript, for all who look at it: what is checked is used."""
    headers = {"content-type": "application/json"}
    for body, param in (
        (b'{"prompt": "x", "n": 1, "n": 200}', "n"),
        (b'{"prompt": "x", "suffix": null, "suffix": "y"}', "suffix"),
        (b'{"prompt": "x", "prompt": ""}', "prompt"),
        (b'{"prompt": "x", "temperature": 1, "temperature": NaN}', "temperature"),
    ):
        response = server.http.post("/v1/completions", content=body, headers=headers)
        assert check_shape(response, 400)["param"] == param, body


@pytest.mark.parametrize(
    "request_",
    [
        completion(stream=True, prompt=[300]),
        completion(stream=True, temperature=-1),
        completion(stream=True, prompt="x" * 1000),
        completion(stream=True, model="gpt-4"),
        chat(stream=True, messages=[]),
        chat(stream=True, n=129),
        chat(stream=True, messages=[{"role": "robot", "content": "x"}]),
    ],
)
def test_a_bad_request_for_a_stream_gets_no_stream(
    server: HttpServer, request_: tuple[str, bytes]
) -> None:
    """Nothing has been sent yet: it is an HTTP error like any other."""
    path, body = request_
    response = server.http.post(path, content=body, headers={"content-type": "application/json"})

    check_shape(response, 404 if b"gpt-4" in body else 400)


UNSUPPORTED: list[tuple[tuple[str, bytes], str]] = [
    (completion(suffix="z"), "suffix"),
    (completion(prompt_embeds="AAAA"), "prompt_embeds"),
    (completion(thinking_token_budget=5), "thinking_token_budget"),
    (chat(thinking_token_budget=0), "thinking_token_budget"),
    (completion(kv_transfer_params={"a": 1}), "kv_transfer_params"),
    (completion(logits_processors=["os.system"]), "logits_processors"),
    (completion(vllm_xargs={"a": [1] * 1000}), "vllm_xargs"),
    (chat(mm_processor_kwargs={"a": 1}), "mm_processor_kwargs"),
    (completion(lora_request={"name": "a"}), "lora_request"),
    (chat(tools=[tool()]), "tools"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(chat_template="{{ x }}"), "chat_template"),
    (chat(modalities=["text", "audio"]), "modalities"),
    *(
        (message(content=[part]), "messages[1].content[0]")
        for part in (
            {"type": "image_url", "image_url": {}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
            {"type": "file", "file": {"file_data": "AAAA"}},
            {"type": "image_embeds", "image_embeds": "AAAA"},
        )
    ),
]


@pytest.mark.row("S-29", "S-34")
@pytest.mark.parametrize(("request_", "param"), UNSUPPORTED)
def test_known_field_that_is_not_served_is_refused(
    server: HttpServer, request_: tuple[str, bytes], param: str
) -> None:
    """A field that OpenAI or vLLM have, and we do not serve yet, is never silently dropped."""
    path, body = request_

    response = server.http.post(path, content=body, headers={"content-type": "application/json"})

    error = check_shape(response, 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/chat/completions", {"OPTIONS", "POST"}),
        ("GET", "/v1/completions", {"OPTIONS", "POST"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("DELETE", "/health", {"GET", "HEAD", "OPTIONS"}),
    ],
)
def test_wrong_method_is_a_405_with_allow(
    server: HttpServer, method: str, path: str, allowed: set[str]
) -> None:
    """The answer says which methods there are."""
    response = server.http.request(method, path)

    check_shape(response, 405)
    assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.row("F-39")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 400),
        ({"content-type": "application/problem+json"}, 400),
    ],
)
@pytest.mark.row("S-36", "S-37")
def test_body_must_be_plain_json(server: HttpServer, headers: dict[str, str], status: int) -> None:
    """Another content type or a compressed body is a 415; JSON goes on to be checked."""
    response = server.http.post("/v1/completions", content=b"{}", headers=headers)

    check_shape(response, status)


@pytest.mark.row("F-34", "S-36")
def test_invalid_content_length_body_over_the_limit_is_refused_unread(server: HttpServer) -> None:
    """9 MiB announced: 413 before the body is read, and the connection is closed."""
    body = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'

    response = server.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )

    error = check_shape(response, 413)
    assert error["code"] == "body_too_large"
    assert response.headers["connection"] == "close"


@pytest.mark.row("F-34", "S-36")
def test_chunked_body_over_the_limit_is_refused_while_it_is_read(server: HttpServer) -> None:
    """No length announced: 413 as soon as it is too long, whatever may still come."""

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * (1 << 20)

    try:
        response = server.http.post(
            "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
    except httpx.WriteError:
        return  # the connection was closed while we were still sending: refused all the same
    check_shape(response, 413)


def test_error_of_a_streaming_request_is_a_plain_http_error(server: HttpServer) -> None:
    """Before the first byte a stream fails like any other request."""
    response = server.complete(prompt="x" * 1000, stream=True)

    error = check_shape(response, 400)
    assert error["code"] == "context_length_exceeded"


def check_shape(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which is in OpenAI's shape and leaks nothing."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    for secret in ("Traceback", "0x", "/tmp", "/work", ".py", "127.0.0.1"):
        assert secret not in response.text
    return error

"""Bodies made to cost as much as they can within the limit of their size: refused at once.

Time is the process's own, client included: wall time says little on a machine with other work.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.http_server import HttpServer, serving
from tests.helpers.processor_time import within

MAX_S = 0.2
FULL = 7 << 20
"""Close to the limit of a body."""
OTHER = 19 << 16
"""Close to the limit of all that is neither prompt nor messages."""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server
        assert server.complete(prompt="ok").json()["choices"][0]["text"] == "ok"


def many(item: bytes, num_bytes: int, end: bytes = b"") -> bytes:
    """As many of an item, with commas between, as fit."""
    return b",".join([item] * (num_bytes // (len(item) + 1))) + end


def keys(num_bytes: int) -> bytes:
    """Members of an object, each with another name."""
    return b",".join(b'"%d":1' % number for number in range(num_bytes // 11))


def texts(num_bytes: int) -> bytes:
    """The same, of short texts."""
    return b",".join(b'"%d":""' % number for number in range(num_bytes // 12))


def completion(fields: bytes, prompt: bytes = b'"x"') -> bytes:
    return b'{"prompt":%b,%b}' % (prompt, fields)


def chat(fields: bytes, messages: bytes = b'[{"role":"user","content":"x"}]') -> bytes:
    return b'{"messages":%b,%b}' % (messages, fields)


def message(fields: bytes) -> bytes:
    return chat(b'"n":1', b'[{"role":"user",%b}]' % fields)


COMPLETIONS: dict[str, Callable[[], bytes]] = {
    "brackets": lambda: b"[" * FULL,
    "brackets in a field": lambda: completion(b'"x":' + b"[" * OTHER),
    "braces": lambda: b'{"a":' * (FULL // 5),
    "empty lists": lambda: completion(b'"x":[%b]' % many(b"[]", FULL)),
    "stop strings": lambda: completion(b'"stop":[%b]' % many(b'""', OTHER)),
    "stop tokens": lambda: completion(b'"stop_token_ids":[%b]' % many(b"1", OTHER)),
    "allowed tokens": lambda: completion(b'"allowed_token_ids":[%b]' % many(b"1", OTHER)),
    "biases": lambda: completion(b'"logit_bias":{%b}' % keys(OTHER)),
    "bad words": lambda: completion(b'"bad_words":[%b]' % many(b'"a"', OTHER)),
    "a long integer": lambda: completion(b'"seed":' + b"9" * OTHER),
    "a long integer out of place": lambda: completion(b'"x":' + b"9" * FULL),
    "many prompts": lambda: completion(b'"n":1', b"[%b]" % many(b"[1]", FULL)),
    "many empty prompts": lambda: completion(b'"n":1', b"[%b]" % many(b'""', FULL)),
    "many tokens": lambda: completion(b'"n":1', b"[%b]" % many(b"1", FULL)),
    "many tokens of which few are kept": lambda: completion(
        b'"truncate_prompt_tokens":1001', b"[%b]" % many(b"1", FULL)
    ),
    "texts and tokens": lambda: completion(b'"n":1', b"[%b]" % many(b'"",[]', FULL)),
    "one long token": lambda: completion(b'"n":1', b"[%b]" % (b"9" * FULL)),
    "a long prompt": lambda: completion(b'"n":1', b'"%b"' % (b"x" * FULL)),
    "a long prompt, escaped": lambda: completion(
        b'"n":1', b'"%b"' % (rb"\ud83d\ude00" * (FULL // 12))
    ),
    "a prompt with many keys": lambda: completion(b'"n":1', b"{%b}" % keys(FULL)),
    "numbers that are none": lambda: completion(b'"x":[%b]' % many(b"NaN", 60_000)),
    "numbers that are none, deep": lambda: completion(b'"x":' + b"[" * 30_000 + b"NaN"),
}
CHATS: dict[str, Callable[[], bytes]] = {
    "empty messages": lambda: chat(b'"n":1', b"[%b]" % many(b"{}", FULL)),
    "messages that are brackets": lambda: chat(b'"n":1', b"[" * FULL),
    "many parts": lambda: message(b'"content":[%b]' % many(b'{"type":"text","text":""}', FULL)),
    "many empty parts": lambda: message(b'"content":[%b]' % many(b"[]", FULL)),
    "a message with many keys": lambda: message(b'"content":"x",%b' % keys(FULL)),
    "many empty tools": lambda: chat(b'"tools":[%b]' % many(b"[]", OTHER)),
    "many calls": lambda: message(b'"tool_calls":[%b]' % many(b"{}", FULL)),
    "a choice with many keys": lambda: chat(b'"tool_choice":{%b}' % keys(OTHER)),
    "many variables": lambda: chat(b'"chat_template_kwargs":{%b}' % keys(OTHER)),
    "many documents": lambda: chat(b'"documents":[%b]' % many(b"{}", FULL)),
    "a document with many keys": lambda: chat(b'"documents":[{%b,"a":1}]' % texts(2 << 20)),
    "deep variables": lambda: chat(b'"chat_template_kwargs":{"a":%b}' % (b"[" * 60_000)),
    "arguments that are brackets": lambda: message(
        b'"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":%b}}]'
        % (b"[" * FULL)
    ),
}
HI = b'[{"role":"user","content":"x"}]'


def anthropic(fields: bytes, messages: bytes = HI) -> bytes:
    return b'{"max_tokens":1,"messages":%b,%b}' % (messages, fields)


def blocks(items: bytes, role: bytes = b"user") -> bytes:
    return anthropic(b'"top_k":1', b'[{"role":"%b","content":[%b]}]' % (role, items))


MESSAGES: dict[str, Callable[[], bytes]] = {
    "empty messages": lambda: anthropic(b'"top_k":1', b"[%b]" % many(b"{}", FULL)),
    "messages that are brackets": lambda: anthropic(b'"top_k":1', b"[" * FULL),
    "many blocks": lambda: blocks(many(b'{"type":"text","text":""}', FULL)),
    "many empty blocks": lambda: blocks(many(b"{}", FULL)),
    "a block with many keys": lambda: blocks(b'{"type":"image",%b}' % keys(FULL)),
    "a result with many blocks": lambda: blocks(
        b'{"type":"tool_result","tool_use_id":"1","content":[%b]}' % many(b"{}", FULL)
    ),
    "an input that is brackets": lambda: blocks(
        b'{"type":"tool_use","id":"1","name":"f","input":{"a":%b}}' % (b"[" * FULL), b"assistant"
    ),
    "an input that is a list": lambda: blocks(
        b'{"type":"tool_use","id":"1","name":"f","input":[%b]}' % many(b"1", FULL // 2),
        b"assistant",
    ),
    "many blocks of system": lambda: anthropic(b'"system":[%b]' % many(b"{}", FULL)),
    "many empty tools": lambda: anthropic(b'"tools":[%b]' % many(b"{}", OTHER)),
    "tools with deep schemas": lambda: anthropic(
        b'"tools":[{"name":"f","input_schema":{"a":%b}}]' % (b"[" * 60_000 + b"]" * 60_000)
    ),
    "tools with wide schemas": lambda: anthropic(
        b'"tools":[{"name":"f","input_schema":{%b}}]' % keys(1_000_000)
    ),
    "stop sequences": lambda: anthropic(b'"stop_sequences":[%b]' % many(b'""', OTHER)),
    "many variables": lambda: anthropic(b'"chat_template_kwargs":{%b}' % keys(OTHER)),
    "a configuration of brackets": lambda: anthropic(b'"output_config":' + b"[" * FULL),
}


def responses(fields: bytes, items: bytes = b'"x"') -> bytes:
    return b'{"max_output_tokens":1,"input":%b,%b}' % (items, fields)


def item(fields: bytes) -> bytes:
    return responses(b'"top_k":1', b"[{%b}]" % fields)


RESPONSES: dict[str, Callable[[], bytes]] = {
    "empty items": lambda: responses(b'"top_k":1', b"[%b]" % many(b"{}", FULL)),
    "items that are brackets": lambda: responses(b'"top_k":1', b"[" * FULL),
    "many parts": lambda: item(
        b'"role":"user","content":[%b]' % many(b'{"type":"input_text","text":""}', FULL)
    ),
    "many parts of a thought": lambda: item(
        b'"type":"reasoning","content":[%b]' % many(b"{}", FULL)
    ),
    "an item with many keys": lambda: item(b'"role":"user",%b' % keys(FULL)),
    "a result with many parts": lambda: item(
        b'"type":"function_call_output","call_id":"1","output":[%b]' % many(b"{}", FULL)
    ),
    "arguments that are brackets": lambda: item(
        b'"type":"function_call","call_id":"1","name":"f","arguments":%b' % (b"[" * FULL)
    ),
    "references": lambda: responses(
        b'"top_k":1', b"[%b]" % many(b'{"type":"item_reference","id":"x"}', FULL)
    ),
    "many empty tools": lambda: responses(b'"tools":[%b]' % many(b"{}", OTHER)),
    "tools with wide schemas": lambda: responses(
        b'"tools":[{"type":"function","name":"f","parameters":{%b}}]' % keys(1_000_000)
    ),
    "a choice of many tools": lambda: responses(
        b'"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[%b]}'
        % many(b'{"type":"function","name":"f"}', FULL)
    ),
    "a choice with many keys": lambda: responses(b'"tool_choice":{%b}' % keys(FULL)),
    "metadata": lambda: responses(b'"metadata":{%b}' % texts(OTHER)),
    "things to include": lambda: responses(b'"include":[%b]' % many(b'""', OTHER)),
    "many variables": lambda: responses(b'"chat_template_kwargs":{%b}' % keys(OTHER)),
    "a format of brackets": lambda: responses(b'"text":{"format":' + b"[" * FULL),
    "a format with many keys": lambda: responses(b'"text":{"format":{%b}}' % keys(FULL)),
}
TOKENS: dict[str, Callable[[], bytes]] = {
    "many tokens": lambda: b'{"tokens":[%b]}' % many(b"1", FULL),
    "one long token": lambda: b'{"tokens":[%b]}' % (b"9" * FULL),
    "tokens that are brackets": lambda: b'{"tokens":' + b"[" * FULL,
}
CASES = [
    *(pytest.param("/v1/completions", make, id=name) for name, make in COMPLETIONS.items()),
    *(pytest.param("/v1/chat/completions", make, id=name) for name, make in CHATS.items()),
    *(pytest.param("/v1/messages", make, id=name) for name, make in MESSAGES.items()),
    *(pytest.param("/v1/responses", make, id=name) for name, make in RESPONSES.items()),
    *(pytest.param("/detokenize", make, id=name) for name, make in TOKENS.items()),
]


@pytest.mark.row("F-37", "F-39")
@pytest.mark.parametrize(("path", "make"), CASES)
def test_a_body_that_would_cost_much_is_refused_at_once(
    server: HttpServer, path: str, make: Callable[[], bytes]
) -> None:
    """400 in the shape of its API, before objects are made of it."""
    content = make()
    headers = {"content-type": "application/json"}

    response = within(MAX_S, lambda: server.http.post(path, content=content, headers=headers))

    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"

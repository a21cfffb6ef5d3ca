"""The batch file format: what is read, what is written, and what is understood of it later."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.lines import (
    BadLine,
    BatchRequest,
    Done,
    Line,
    answered,
    encode,
    failed,
    parse_line,
)

FIELDS: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "x"},
}


def line(**changes: Any) -> Line:
    """A line of the input; None takes a field out."""
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if value is not None}
    return parse_line(7, json.dumps(fields).encode())


def bad(**changes: Any) -> BadLine:
    found = line(**changes)
    assert isinstance(found, BadLine)
    return found


def test_a_body_is_sent_as_it_was_written() -> None:
    """To the byte: the numbers of a seed or a bias are nobody's to round."""
    content = b'{"body": {"seed":12345678901234567890, "x": 1.0},"custom_id":"a","method":"POST",'
    request = parse_line(1, content + b'"url":"/v1/chat/completions", "more": 1}\r\n')

    assert isinstance(request, BatchRequest)
    assert request.body == b'{"seed":12345678901234567890, "x": 1.0}'
    assert (request.custom_id, request.url) == ("a", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"custom_id": 3}, "invalid_type", "custom_id"),
        ({"body": "x"}, "invalid_type", "body"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"url": "http://elsewhere/v1/completions"}, "invalid_url", "url"),
        ({"body": {"stream": True}}, "invalid_value", "body.stream"),
        ({"body": {"background": True}}, "invalid_value", "body.background"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(changes: dict[str, Any], code: str, param: str) -> None:
    """With OpenAI's codes, the field, and the number of the line."""
    found = bad(**changes)

    assert (found.code, found.param, found.line) == (code, param, 7)


def test_choices_are_listed_as_people_list_them() -> None:
    """All of them, once."""
    assert bad(method="GET").message == "method must be POST, not 'GET'"
    urls = "/v1/chat/completions, /v1/completions or /v1/responses"
    assert bad(url="/v1/embeddings").message == f"url must be {urls}, not '/v1/embeddings'"


def test_a_bad_line_keeps_its_custom_id() -> None:
    """As far as it has one: the result can be told by it."""
    assert bad(method="GET").custom_id == "a"
    assert bad(custom_id=None).custom_id is None


def test_false_and_null_are_no_stream() -> None:
    """Clients write out defaults."""
    assert isinstance(line(body={"stream": False}), BatchRequest)
    assert isinstance(parse_line(1, json.dumps(FIELDS).encode()), BatchRequest)


@given(st.binary() | st.text().map(str.encode) | st.just(b'{"a":' + b"[" * 20000))
def test_any_bytes_are_a_line(content: bytes) -> None:
    """A good one or a bad one, and never an exception that would end the batch."""
    assert parse_line(1, content).line == 1


def test_a_result_has_openais_fields() -> None:
    """For an answer and for a refusal, which differ in the status."""
    request = line()
    assert isinstance(request, BatchRequest)
    good = json.loads(encode(answered(request, 200, "r1", b'{"id": "x"}')))
    refused = json.loads(encode(answered(request, 400, None, b'{"error": {"message": "no"}}')))

    assert good["id"].startswith("batch_req_")
    assert {**good, "id": ""} == {
        "id": "",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"id": "x"}},
        "error": None,
    }
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["message"] == "no"
    assert refused["error"] is None
    assert refused["id"] != good["id"]


def test_a_result_is_one_line() -> None:
    """Also where the server writes its JSON for people."""
    request = line()
    assert isinstance(request, BatchRequest)
    content = encode(answered(request, 200, "r", json.dumps({"a": ["\n", 1]}, indent=2).encode()))

    assert content.count(b"\n") == 1
    assert content.endswith(b"\n")
    assert json.loads(content)["response"]["body"] == {"a": ["\n", 1]}


@pytest.mark.parametrize("body", [b"<html>", b"", b'{"a": NaN}', b'{"a": "\xff"}', b"{}{}"])
def test_what_is_no_json_is_a_failure(body: bytes) -> None:
    """It would spoil the file for whoever reads it."""
    request = line()
    assert isinstance(request, BatchRequest)
    result = answered(request, 200, "r", body)

    assert not result.is_success
    assert result.error is not None
    assert result.error.code == "invalid_response"


def test_results_are_understood_again() -> None:
    """By custom_id; of lines that have none, by number."""
    request = line()
    assert isinstance(request, BatchRequest)
    refused = BatchRequest(2, "b", request.url, request.body)
    nameless = BadLine(3, None, "invalid_json_line", "no JSON")
    done = Done()
    for result in (
        answered(request, 200, "r", b"{}"),
        answered(refused, 404, "r", b"{}"),
        failed(nameless),
    ):
        assert done.add(encode(result))

    assert done.success(request) is True
    assert done.success(refused) is False
    assert done.success(nameless) is False
    assert done.success(BadLine(4, None, "", "")) is None
    assert done.success(BatchRequest(3, "c", "", b"")) is None


def test_vllms_results_are_understood_too() -> None:
    """A batch that was begun there may be ended here."""
    done = Done()
    error = {"error": {"message": "no", "code": 400}}

    assert done.add(
        b'{"id":"vllm-1","custom_id":"a","response":{"status_code":200,"request_id":"x",'
        b'"body":{"id":"y"}},"error":null}'
    )
    assert done.add(
        json.dumps(
            {
                "id": "vllm-2",
                "custom_id": "b",
                "response": {"status_code": 400, "request_id": "x", "body": None},
                "error": error,
            }
        ).encode()
    )
    assert done.by_id == {"a": True, "b": False}


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"x", b'{"custom_id": "a"}', b"\xff"])
def test_other_lines_are_no_results(content: bytes) -> None:
    """A file of somebody else's is not taken for ours."""
    assert not Done().add(content)

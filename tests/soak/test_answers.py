"""The soak run's own judgement: what it would not let pass."""

import asyncio
import json

import aiohttp
import pytest

from api.chaos import Kind
from tests.helpers.canned_http import canned_server, chunk, stream
from tests.soak.answers import Answer, Improper
from tests.soak.cases import COMPLETIONS, Case
from tests.soak.exchange import Exchange, ask
from tests.soak.faults import Dealt
from tests.soak.parts import PARTS
from tests.soak.watch import Footprint, grown, parse

END = {"index": 0, "text": "", "finish_reason": "stop"}


def taken(*events: dict[str, object]) -> Answer:
    answer = Answer()
    for event in events:
        answer.take(event)
    return answer


def test_a_choice_ends_once() -> None:
    """Neither twice, nor not at all, nor before its last text; and nothing follows an error."""
    with pytest.raises(Improper, match="goes on after"):
        taken({"choices": [END]}, {"choices": [END]})
    with pytest.raises(Improper, match=r"the ends \[\]"):
        taken({"choices": [{"index": 0, "text": "a"}]}).check_whole(1)
    with pytest.raises(Improper, match=r"choices \[0\] of 2"):
        taken({"choices": [END]}).check_whole(2)
    with pytest.raises(Improper, match="after the end"):
        taken({"error": {}}, {"choices": [END]})
    taken({"choices": [{"index": 0, "text": "a"}]}, {"choices": [END]}).check_whole(1)


def test_every_part_of_an_answer_is_compared() -> None:
    """One that differs in anything is not its twin, log probabilities within a tolerance."""

    def one(text: str = "ab", value: float = -1.0, end: str = "stop", tokens: int = 2) -> Answer:
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [None, value]}
        choice = {"index": 0, "text": text, "finish_reason": end, "logprobs": logprobs}
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return taken({"choices": [choice], "usage": usage})

    assert one().difference(one(), 0.0) is None
    assert one(value=-1.001).difference(one(), 0.01) is None
    for other in (one("ac"), one(value=-1.1), one(end="length"), one(tokens=3)):
        assert other.difference(one(), 0.01) is not None


def test_pieces_are_the_whole() -> None:
    """Texts, log probabilities and calls of tools add up over events."""
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    streamed = taken(
        {"choices": [{"index": 0, "delta": {"content": "a", "tool_calls": [call]}}]},
        {"choices": [{"index": 0, "delta": {"content": "b", "tool_calls": [more]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    )
    whole = {"name": "f", "arguments": '{"a": 1}'}
    message = {"content": "ab", "tool_calls": [{"function": whole}]}
    plain = taken({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    assert streamed.difference(plain, 0.0) is None


WHOLE = ('{"choices": [{"index": 0, "text": "a"}]}', json.dumps({"choices": [END]}))
ERROR = '{"error": {"code": "engine_dead"}}'
PLAIN_503 = b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n%b"


@pytest.mark.parametrize(
    ("reply", "end"),
    [
        (stream(*WHOLE), "whole"),
        ([*stream(*WHOLE)[:-2], chunk(b"")], "improper"),  # no [DONE]
        (stream(WHOLE[0]), "improper"),
        (stream(WHOLE[0], ERROR), "improper"),  # as if it had gone well
        ([*stream(WHOLE[0], ERROR)[:-2], chunk(b"")], "error"),
        ([], "broken"),
        ([PLAIN_503 % (len(ERROR), ERROR.encode())], "error"),
        ([PLAIN_503 % (12, b'{"error":{}}')], "down"),
        ([PLAIN_503 % (4, b"oops")], "improper"),
    ],
)
def test_ends_are_told_apart(reply: list[bytes], end: str) -> None:
    """What went wrong decides whether a fault may account for it."""

    async def run(port: int) -> Exchange:
        async with aiohttp.ClientSession() as session:
            case = Case("c", COMPLETIONS, {"model": "m"})
            return await ask(session, f"http://127.0.0.1:{port}", case, is_streamed=True)

    with canned_server(reply) as server:
        exchange = asyncio.run(run(server.port))
    assert (exchange.end, exchange.why) == (end, exchange.why)


def test_the_same_seed_asks_the_same() -> None:
    """Or a run could not be repeated; names are unique, since twins are found by them."""
    for part in PARTS:
        cases, again = part.make_cases(7), part.make_cases(7)
        assert [case.body for case in cases] == [case.body for case in again]
        assert [case.body for case in cases] != [case.body for case in part.make_cases(8)]
        assert len({case.name for case in cases}) == len(cases) > 40


def test_what_has_grown_is_named() -> None:
    """Memory beyond a twentieth, descriptors, threads, and processes that have gone."""
    before = {"A": Footprint(1000, 20, 5), "B": Footprint(1000, 20, 5)}
    assert grown(before, before) == []
    after = {"A": Footprint(1100, 30, 9)}
    assert grown(before, after) == [
        "A: 1000 MiB, then 1100",
        "A: 20 file descriptors, then 30",
        "A: 5 threads, then 9",
        "B is not there any more",
    ]


def test_only_a_kill_of_its_server_excuses_a_request() -> None:
    """And only those that it has reached in time."""
    case = Case("c", COMPLETIONS, {})
    broken = Exchange(case, True, began_at=10.0, ended_at=12.0, end="broken")
    error = Exchange(case, True, began_at=10.0, ended_at=12.0, end="error")

    def dealt(kind: str, at: float = 11.0) -> Dealt:
        return Dealt(Kind.parse(kind), "", at, back_at=at + 5)

    assert dealt("kill-api-server").excuses(broken, "replace")
    assert not dealt("kill-api-server").excuses(error, "replace")
    assert not dealt("kill-rank").excuses(broken, "replace")
    assert dealt("kill-rank").excuses(error, "exit")
    assert not dealt("pause-rank").excuses(broken, "exit")
    assert not dealt("kill-rank", at=13.0).excuses(error, "exit")


def test_metrics_are_read() -> None:
    """With their labels; comments are none."""
    assert parse('# HELP a b\na_total{x="1 2"} 3\nb 0.5\n') == {'a_total{x="1 2"}': 3, "b": 0.5}

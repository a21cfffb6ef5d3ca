"""Request fields on a real model in float32, through the whole system: what they change is what
plain transformers makes of the same definition."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from api.tokenizer import Tokenizer
from tests.helpers.server import running_server
from tests.helpers.tiny_models import clear_prompts, greedy_tokens, plain_logits, tiny_model

pytestmark = pytest.mark.slow

EOS = 1
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    flags = ("--served-model-name", "m", "--dtype", "float32", "--block-size", "8")
    with running_server(str(folder), *flags) as server, server.http() as client:
        yield client


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return clear_prompts(folder, 3, NUM_TOKENS)


def complete(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "temperature": 0, "return_token_ids": True, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def plain_beams(
    folder: Path, prompt: Sequence[int], width: int, penalty: float, ends: frozenset[int]
) -> list[tuple[list[int], float]]:
    """The definition, on transformers: tokens and log probability of the best beams."""
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int], int]] = []
    for _ in range(NUM_TOKENS):
        longer = []
        for total, tokens in alive:
            logits = plain_logits(folder, [*prompt, *tokens])[-1].double()
            best = torch.log_softmax(logits, -1).topk(2 * width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if token in ends:
                    done.append((total + value, [*tokens, token], len(tokens)))
                else:
                    longer.append((total + value, [*tokens, token]))
        alive = sorted(longer, key=lambda entry: -entry[0])[:width]
    done += [(total, tokens, len(tokens)) for total, tokens in alive]
    done.sort(key=lambda entry: -entry[0] / float((len(prompt) + entry[2]) ** penalty))
    return [(tokens, total) for total, tokens, _ in done[:width]]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (4, 3.0), (10, 0.0)])
def test_beam_search_is_that_of_its_definition(
    client: httpx.Client, folder: Path, prompts: list[list[int]], width: int, penalty: float
) -> None:
    """All prompts together, beams that end among them: the same tokens in the same order, with the
    same probabilities."""
    ends = frozenset({EOS, *range(2, 60)})  # so many that some beams end

    found = complete(
        client,
        prompt=prompts,
        use_beam_search=True,
        n=width,
        length_penalty=penalty,
        max_tokens=NUM_TOKENS,
        logprobs=0,
        stop_token_ids=sorted(ends - {EOS}),
    )

    for place, prompt in enumerate(prompts):
        expected = plain_beams(folder, prompt, width, penalty, ends)
        of_one = found[place * width : (place + 1) * width]
        assert [choice["token_ids"] for choice in of_one] == [tokens for tokens, _ in expected]
        for choice, (tokens, total) in zip(of_one, expected, strict=True):
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-3)
            assert (choice["finish_reason"] == "stop") == (tokens[-1] in ends)


def test_beam_search_is_the_same_beside_others(
    client: httpx.Client, prompts: list[list[int]]
) -> None:
    """Several at a time, and other requests between them: nothing about it is random."""

    def search(place: int) -> list[list[int]]:
        fields: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": 12}
        if place % 3 == 2:
            fields = {"n": 4, "max_tokens": 12, "temperature": 1.5}
        return [c["token_ids"] for c in complete(client, prompt=prompts[0], **fields)]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(search, range(12)))

    searched = [tokens for place, tokens in enumerate(found) if place % 3 != 2]
    assert searched == [searched[0]] * len(searched)
    assert len({tuple(tokens) for tokens in searched[0]}) == 4


def test_greedy_answer_goes_round_bad_words(
    client: httpx.Client, folder: Path, prompts: list[list[int]]
) -> None:
    """Token by token what transformers' best token is without those that would complete one."""
    tokenizer = Tokenizer.load(folder)
    words = [chr(code) for code in range(ord("a"), ord("m"))] + ["the", "ox", "\N{BULLET}"]
    sequences = [
        tokenizer.encode(spelling, add_special_tokens=False)
        for word in words
        for spelling in (word, f" {word}")
    ]

    num_changed = 0
    for prompt in prompts:
        [choice] = complete(
            client, prompt=prompt, bad_words=words, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        expected: list[int] = []
        for _ in range(NUM_TOKENS):
            logits = plain_logits(folder, [*prompt, *expected])[-1].clone()
            for *beginning, last in sequences:
                if expected[len(expected) - len(beginning) :] == beginning:
                    logits[last] = -torch.inf
            expected.append(int(logits.argmax()))
        assert choice["token_ids"] == expected
        num_changed += expected != greedy_tokens(folder, prompt, NUM_TOKENS)
    assert num_changed > 0


def test_log_probabilities_of_listed_tokens_are_the_models(
    client: httpx.Client, folder: Path, prompts: list[list[int]]
) -> None:
    """For a classifier that reads them: each label at each place."""
    labels = [5, 77, 388]

    [choice] = complete(
        client,
        prompt=prompts[1],
        max_tokens=1,
        logprobs=0,
        logprob_token_ids=labels,
        return_tokens_as_token_ids=True,
    )

    plain = torch.log_softmax(plain_logits(folder, prompts[1])[-1], -1)
    [top] = choice["logprobs"]["top_logprobs"]
    sampled = choice["token_ids"][0]
    assert top == {
        f"token_id:{i}": pytest.approx(float(plain[i]), abs=1e-3) for i in (sampled, *labels)
    }


def test_best_of_is_the_likeliest_of_what_n_makes(
    client: httpx.Client, prompts: list[list[int]]
) -> None:
    """With a seed both make the same continuations; one of them shows the best only."""
    fields: dict[str, Any] = {
        "prompt": prompts[2],
        "max_tokens": NUM_TOKENS,
        "temperature": 1.5,
        "seed": 11,
        "logprobs": 0,
        "ignore_eos": True,
    }

    every = complete(client, n=6, **fields)
    best = complete(client, n=2, best_of=6, **fields)

    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [c["token_ids"] for c in best] == [c["token_ids"] for c in ranked[:2]]

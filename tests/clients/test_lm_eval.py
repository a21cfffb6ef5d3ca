"""`lm-eval`, in an environment of its own: its scores are those that transformers gives.

The tasks are written by the tests, with three lines of data each: nothing is fetched from anywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from api.tokenizer import Tokenizer
from tests.clients.environments import run
from tests.clients.servers import Servers
from tests.helpers.tiny_models import greedy_tokens, plain_logits, tiny_model

CLIENT = "lm-eval"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1
NUM_TOKENS = 24

CHOICES: list[dict[str, Any]] = [
    {"question": "The quick brown", "choices": ["fox", "dog", "jug"], "answer": 0},
    {"question": "Pack my box", "choices": ["with five", "of black", "!"], "answer": 1},
    {"question": "Größe, naïve", "choices": ["café", "Привет", "你好"], "answer": 2},
]
TEXTS = [{"text": "The quick brown fox"}, {"text": "Sphinx of black"}, {"text": "jugs! 12345"}]

GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": NUM_TOKENS},
    "metric_list": [{"metric": "exact_match"}],
}
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "write": GENERATE,
    "repeat": GENERATE,
}
"""By name. An evaluation that takes several has to be started once."""

Samples = dict[str, list[dict[str, Any]]]
"""What lm-eval has noted of each document, in their order, by task."""


@pytest.fixture(scope="module")
def model(servers: Servers) -> Path:
    return tiny_model("llama", servers.folder)


@pytest.fixture(scope="module")
def samples(
    python: Path, servers: Servers, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    """Those of `local-completions` on the tiny model."""
    arguments = {
        "model": "m",
        "base_url": f"{servers['tiny'].openai_url}/completions",
        "tokenizer": model,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    flags = ["--model", "local-completions", *model_args(arguments)]
    return evaluate(python, flags, tmp_path_factory.mktemp("tasks"), ["choose", "read", "write"])


def test_scores_choices(samples: Samples, model: Path) -> None:
    """The log probability of each choice is that of transformers, and so is whether it would have
    been generated."""
    for sample, doc in zip(samples["choose"], CHOICES, strict=True):
        for [[score, is_greedy]], choice in zip(sample["resps"], doc["choices"], strict=True):
            expected = plain_score(model, doc["question"], f" {choice}")
            assert float(score) == pytest.approx(expected.logprob, abs=1e-3)
            assert is_greedy == str(expected.is_greedy)


def test_scores_whole_texts(samples: Samples, model: Path) -> None:
    """Perplexity, which has texts scored from their first token."""
    for sample, doc in zip(samples["read"], TEXTS, strict=True):
        expected = plain_score(model, "", doc["text"])
        [[logprob]] = sample["resps"]
        assert float(logprob) == pytest.approx(expected.logprob, abs=1e-3)


def test_generates(samples: Samples, model: Path) -> None:
    """Greedy text is what transformers generates."""
    assert [sample["resps"] for sample in samples["write"]] == [
        [[plain_text(model, doc["text"])]] for doc in TEXTS
    ]


def test_chats(python: Path, servers: Servers, tmp_path: Path) -> None:
    """`local-chat-completions`: an echo gets full marks for saying what it was told."""
    url = f"{servers['echo'].openai_url}/chat/completions"
    arguments = {"model": "m", "base_url": url, "num_concurrent": 2, "max_retries": 1}
    flags = ["--model", "local-chat-completions", "--apply_chat_template"]
    found = evaluate(python, [*flags, *model_args(arguments)], tmp_path, ["repeat"])

    assert [sample["exact_match"] for sample in found["repeat"]] == [1.0, 1.0, 1.0]


def model_args(arguments: Mapping[str, object]) -> list[str]:
    return ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]


def evaluate(python: Path, flags: list[str], folder: Path, names: list[str]) -> Samples:
    """Let lm-eval do these tasks."""
    for name in names:
        documents = CHOICES if name == "choose" else TEXTS
        write_task(folder, name, documents)
    out = ["--output_path", str(folder / "out"), "--log_samples"]
    tasks = ["--tasks", ",".join(names), "--include_path", str(folder), "--batch_size", "1"]
    run(python, ["-m", "lm_eval", *flags, *tasks, *out], folder)
    return {name: read_samples(folder / "out", name) for name in names}


def write_task(folder: Path, name: str, documents: list[Any]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    described = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **TASKS[name],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(described))  # JSON is YAML


def read_samples(folder: Path, name: str) -> list[dict[str, Any]]:
    [file] = folder.rglob(f"samples_{name}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


@dataclass(frozen=True)
class Score:
    logprob: float
    is_greedy: bool


def plain_score(model: Path, context: str, continuation: str) -> Score:
    """How likely a continuation is, by transformers."""
    tokenizer = Tokenizer.load(model)
    token_ids = [BOS_TOKEN_ID] if not context else []  # what lm-eval puts before whole texts
    token_ids += tokenizer.encode(context + continuation)
    start = len(tokenizer.encode(context)) if context else 1
    logprobs = torch.log_softmax(plain_logits(model, token_ids)[start - 1 : -1], -1)
    chosen = torch.tensor(token_ids[start:])
    return Score(
        logprob=float(logprobs.gather(1, chosen[:, None]).sum()),
        is_greedy=bool((logprobs.argmax(-1) == chosen).all()),
    )


def plain_text(model: Path, prompt: str) -> str:
    """What transformers generates, as lm-eval cuts it."""
    tokenizer = Tokenizer.load(model)
    token_ids = greedy_tokens(model, tokenizer.encode(prompt), NUM_TOKENS)
    if EOS_TOKEN_ID in token_ids:
        token_ids = token_ids[: token_ids.index(EOS_TOKEN_ID)]
    return tokenizer.decode(token_ids).split("\n\n")[0]

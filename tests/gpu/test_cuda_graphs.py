"""Decodes as CUDA graphs against decodes without. Where there is no GPU, they are unproved."""

from pathlib import Path

import pytest
import torch

from api.llm import LLM
from api.sampling import SamplingParams
from tests.helpers.tiny_models import clear_prompts, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 32


def test_graphs_give_the_tokens_that_they_give_one_by_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Batches of many sizes, and the log says that they were captured."""
    folder = tiny_model("llama", tmp_path)
    prompts = clear_prompts(folder, 20, NUM_TOKENS)
    answers = [_answers(folder, prompts, enforce_eager) for enforce_eager in (False, True)]

    assert answers[0] == answers[1]
    log = capfd.readouterr().err
    assert log.count("decodes captured") == 1
    assert "cannot be captured" not in log


def _answers(folder: Path, prompts: list[list[int]], enforce_eager: bool) -> list[list[int]]:
    with LLM(
        str(folder),
        device="cuda",
        dtype="bfloat16",
        enforce_eager=enforce_eager,
        log_level="info",
    ) as llm:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS - i)
            for i in range(len(prompts))
        ]
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [answer.outputs[0].token_ids for answer in found]

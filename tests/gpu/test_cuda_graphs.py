"""Decodes as CUDA graphs against decodes without. Where there is no GPU, they are unproved."""

from pathlib import Path

import pytest
import torch

from api.llm import LLM
from api.sampling import SamplingParams
from tests.helpers.tiny_models import clear_prompts, tiny_model
from workers import cuda_graphs
from workers.cuda_graphs import CannotCapture

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


def test_what_cannot_be_captured_leaves_the_stream_as_it_was() -> None:
    """A model that waits for the device, and one that can be captured after it."""
    before, ones = torch.cuda.current_stream(), torch.ones(3, device="cuda")
    record = cuda_graphs._CudaRecorder()

    with pytest.raises(CannotCapture, match="captur"):
        record(lambda: ones * ones.sum().item())

    assert torch.cuda.current_stream() == before
    assert (ones + 1).sum().item() == 6
    recording = cuda_graphs._CudaRecorder()(lambda: ones + 1)
    ones.fill_(5)
    recording.replay()
    assert recording.states.tolist() == [6, 6, 6]


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

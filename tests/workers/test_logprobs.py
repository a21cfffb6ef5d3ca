"""Log probabilities are the model's own, with ranks and the best alternatives."""

import numpy as np
import pytest
import torch

from workers import logprobs, token_choice


@pytest.mark.parametrize("vocab_size", [7, 300, 40_001])
def test_values_are_the_log_softmax(vocab_size: int) -> None:
    """The token and its best alternatives have the log probabilities of the definition."""
    logits = torch.randn(6, vocab_size, generator=torch.manual_seed(1)) * 4
    tokens = torch.tensor([0, 1, 2, 3, vocab_size - 1, 5])
    expected = logits.double().log_softmax(-1)
    k = min(5, vocab_size)

    found = logprobs.prompt_logprobs(logits, tokens, k)

    best, best_ids = expected.topk(k)
    assert found.token_ids[:, 0].tolist() == tokens.tolist()
    assert found.token_ids[:, 1:].tolist() == best_ids.tolist()
    own = expected.gather(1, tokens.unsqueeze(1))
    assert np.allclose(found.logprobs, torch.cat([own, best], 1), atol=1e-5)
    assert found.token_ids.dtype == np.uint32
    assert found.logprobs.dtype == np.float32
    assert found.ranks.dtype == np.uint32


@pytest.mark.parametrize("vocab_size", [300, 40_001])
def test_rank_counts_the_tokens_that_are_more_likely(vocab_size: int) -> None:
    """The best token has rank 1, the worst the vocabulary's size, and equals share a rank."""
    logits = torch.arange(vocab_size, dtype=torch.float32).repeat(4, 1)
    logits[3, [5, 6]] = 1e6
    tokens = torch.tensor([vocab_size - 1, vocab_size - 100, 0, 6])

    found = logprobs.prompt_logprobs(logits, tokens, 0)

    assert found.ranks.tolist() == [1, 100, vocab_size, 1]
    assert found.logprobs.shape == (4, 1)


def test_many_rows_are_the_same_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is worked on in chunks, which nobody can tell."""
    logits = torch.randn(33, 500, generator=torch.manual_seed(2))
    tokens = torch.arange(33)
    whole = logprobs.prompt_logprobs(logits, tokens, 3)

    monkeypatch.setattr(token_choice, "CHUNK_BYTES", 4 * 500 * 2)
    parts = logprobs.prompt_logprobs(logits, tokens, 3)

    assert (whole.logprobs == parts.logprobs).all()
    assert (whole.token_ids == parts.token_ids).all()


def test_no_rows_give_no_log_probabilities() -> None:
    """A prompt of one token has none to report."""
    found = logprobs.prompt_logprobs(torch.empty(0, 100), torch.empty(0, dtype=torch.int64), 2)

    assert found.logprobs.shape == (0, 3)
    assert found.ranks.shape == (0,)

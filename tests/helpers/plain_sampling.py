"""The plain definition of sampling, as slow and obvious as can be: what the sampler is compared
with."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams

Floats = NDArray[np.float64]


def probabilities(
    logits: Floats,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Floats:
    """Return how likely each token is to be sampled next."""
    edited = edit(logits, params, prompt, output)
    order = sorted(range(len(edited)), key=lambda i: (-edited[i], i))
    kept: Floats = np.zeros(len(edited))
    if params.temperature < 1e-5:
        kept[order[0]] = 1.0
        return kept
    weights = softmax(edited / params.temperature)
    stays = [i for i in order if weights[i] >= params.min_p * weights[order[0]]]
    if params.top_k > 0:
        stays = stays[: params.top_k]
    left = sum(weights[i] for i in stays)
    before = 0.0
    for i in stays:
        if params.top_p == 1.0 or before < params.top_p * left:
            kept[i] = weights[i]
        before += weights[i]
    kept /= kept.sum()
    return kept


def edit(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Return the logits as the request wants them changed."""
    edited = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        banned = set(range(len(edited))) - set(params.allowed_token_ids)
        edited[list(banned)] = -np.inf
    for *beginning, last in params.bad_words_token_ids:
        if len(beginning) <= len(output) and [*output][len(output) - len(beginning) :] == beginning:
            edited[last] = -np.inf
    if len(output) < params.min_tokens:
        edited[[*params.eos_token_ids, *params.stop_token_ids]] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    for token_id in {*prompt, *output}:
        if edited[token_id] > 0:
            edited[token_id] /= params.repetition_penalty
        else:
            edited[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output).items():
        edited[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return edited


def softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights

"""What a request changes in its logits before sampling: allowed ids, bad words, end tokens, bias,
penalties.

Used by `sampler`. Each request that wants a change has one `LogitEdits`, built when it arrives and
kept up to date token by token; `apply` edits all rows of a step at once. The order is vLLM's:

    allowed_token_ids -> bad words -> min_tokens -> logit_bias
                      -> repetition -> frequency and presence penalty -> end of a long thought

The mask of a structured output was there before, and wins: where the first three would leave
nothing of what it allows, they are left out of that step, and a thought ends where it lets it.

Repetition counts the prompt and the output, as in Keskar et al. 2019, "CTRL", section 4.1; the
other two count the output only, as in OpenAI's API.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling_params import SamplingParams
from workers import token_masks
from workers.bad_words import BadWords
from workers.thought_limit import ThoughtLimit
from workers.token_masks import Bits

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_NO_IDS: Ids = np.empty(0, np.int64)
_NO_FLOATS: Floats = np.empty(0, np.float32)


class LogitEdits:
    """The edits of one request."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Ids, output: Ids) -> None:
        self.num_output = len(output)
        self.allowed = _ids_below(vocab_size, params.allowed_token_ids or ())
        self.min_tokens = params.min_tokens
        self.banned = _banned_ids(params, vocab_size)
        bias = {i: b for i, b in (params.logit_bias or {}).items() if i < vocab_size}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.repetition_penalty = params.repetition_penalty
        self.frequency_penalty = params.frequency_penalty
        self.presence_penalty = params.presence_penalty
        self.counts = _counts(params, prompt, output)
        bad_words = [ids for ids in params.bad_words_token_ids if ids[-1] < vocab_size]
        self.bad_words = BadWords(bad_words, output) if bad_words else None
        budget = params.thinking_budget
        self.thoughts = ThoughtLimit(budget, output.tolist()) if budget is not None else None

    @staticmethod
    def wanted_by(params: SamplingParams) -> bool:
        """Whether a request needs any edit at all. Most do not, and cost nothing."""
        return (
            params.allowed_token_ids is not None
            or params.min_tokens > 0
            or bool(params.logit_bias)
            or bool(params.bad_words_token_ids)
            or params.thinking_budget is not None
            or _has_penalties(params)
        )

    def limits(self, mask: Bits | None) -> tuple[Ids, Ids]:
        """Return, for the step to come, the ids that are allowed, none for no such limit, and those
        that are banned."""
        allowed = self.allowed
        banned = self.banned if self.num_output < self.min_tokens else _NO_IDS
        if self.bad_words is not None:
            with_words = np.concatenate([self.bad_words.banned(), banned])
            # Where nothing else may come, what is allowed wins over words.
            if mask is not None or not len(allowed) or len(np.setdiff1d(allowed, with_words)):
                banned = with_words
        if mask is None:
            return allowed, banned
        allowed = allowed[token_masks.are_allowed(mask, allowed)]
        num_left = len(allowed) or token_masks.num_allowed(mask)
        hit = np.unique(banned[token_masks.are_allowed(mask, banned)])
        if len(allowed):
            hit = np.intersect1d(hit, allowed)
        return allowed, (banned if len(hit) < num_left else _NO_IDS)

    def append(self, token_id: int) -> None:
        """Take note of a new output token."""
        self.num_output += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.bad_words is not None:
            self.bad_words.append(token_id)
        if self.thoughts is not None:
            self.thoughts.append(token_id)


class TokenCounts:
    """How often each token occurs in a request's output. Sparse: as long as its distinct tokens.

    Prompt tokens are there with a count of 0, if they were given.
    """

    def __init__(self, prompt: Ids, output: Ids) -> None:
        out_ids, out_counts = np.unique(output, return_counts=True)
        prompt_only = np.setdiff1d(prompt, out_ids)
        self._num = len(out_ids) + len(prompt_only)
        self._ids = np.concatenate([out_ids, prompt_only])
        self._counts = np.zeros(self._num, np.float32)
        self._counts[: len(out_ids)] = out_counts
        self._places: dict[int, int] = {i: p for p, i in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> Ids:
        return self._ids[: self._num]

    @property
    def counts(self) -> Floats:
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count one output token."""
        place = self._places.setdefault(token_id, self._num)
        if place == self._num:
            self._make_room()
            self._ids[place] = token_id
            self._counts[place] = 0.0
            self._num += 1
        self._counts[place] += 1.0

    def _make_room(self) -> None:
        if self._num == len(self._ids):
            # Doubling keeps the cost of a token constant however long the output grows.
            room = max(64, self._num)
            self._ids = np.concatenate([self._ids, np.empty(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.empty(room, np.float32)])


def apply(
    logits: Tensor, edits: Iterable[tuple[int, LogitEdits]], masks: Mapping[int, Bits] | None = None
) -> None:
    """Edit rows of `[n, vocab]` logits in place, given as pairs of row and edits; within a row they
    lie side by side. `masks`, by row, have been laid over them."""
    pairs = list(edits)
    limits = [(row, *e.limits((masks or {}).get(row))) for row, e in pairs]
    _keep_allowed(logits, [(row, allowed) for row, allowed, _ in limits if len(allowed)])
    _ban(logits, [(row, banned) for row, _, banned in limits if len(banned)])
    _add_bias(logits, pairs)
    _penalize(logits, [(row, e, e.counts) for row, e in pairs if e.counts is not None])
    _end_thoughts(
        logits, [(row, e.thoughts) for row, e in pairs if e.thoughts is not None], masks or {}
    )


def _keep_allowed(logits: Tensor, ids: list[tuple[int, Ids]]) -> None:
    for row, row_ids in ids:
        allowed = torch.from_numpy(row_ids).to(logits.device)
        kept = logits[row, allowed]
        logits[row].fill_(-torch.inf)
        logits[row, allowed] = kept


def _ban(logits: Tensor, ids: list[tuple[int, Ids]]) -> None:
    if ids:
        _flat(logits).index_fill_(0, _places(logits, ids), -torch.inf)


def _add_bias(logits: Tensor, pairs: list[tuple[int, LogitEdits]]) -> None:
    active = [(row, e) for row, e in pairs if len(e.bias_ids)]
    if active:
        places = _places(logits, [(row, e.bias_ids) for row, e in active])
        bias = _column(logits, [e.bias for _, e in active])
        flat = _flat(logits)
        flat[places] = flat[places] + bias


def _penalize(logits: Tensor, pairs: list[tuple[int, LogitEdits, TokenCounts]]) -> None:
    if not pairs:
        return
    places = _places(logits, [(row, counts.ids) for row, _, counts in pairs])
    counts = _column(logits, [counts.counts for _, _, counts in pairs])
    lengths = [len(counts.ids) for _, _, counts in pairs]
    repetition, frequency, presence = (
        _column(logits, [np.repeat(np.array(values, np.float32), lengths)])
        for values in zip(
            *[(e.repetition_penalty, e.frequency_penalty, e.presence_penalty) for _, e, _ in pairs],
            strict=True,
        )
    )
    flat = _flat(logits)
    seen = flat[places]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat[places] = seen - frequency * counts - presence * (counts > 0)


def _end_thoughts(
    logits: Tensor, pairs: list[tuple[int, ThoughtLimit]], masks: Mapping[int, Bits]
) -> None:
    for row, thoughts in pairs:
        if (token_id := thoughts.forced) is not None:
            mask = masks.get(row)
            if mask is not None and not token_masks.are_allowed(mask, np.array([token_id]))[0]:
                continue  # in the middle of a character, say: it will be, soon
            logits[row].fill_(-torch.inf)
            logits[row, token_id] = 0.0


def _flat(logits: Tensor) -> Tensor:
    """The same memory as one row, from the first logit to the last. Rows may lie apart in it: what
    tensor ranks gather is cut where their padding begins."""
    num_rows, vocab_size = logits.shape
    return logits.as_strided(((num_rows - 1) * logits.stride(0) + vocab_size,), (1,))


def _places(logits: Tensor, ids: list[tuple[int, Ids]]) -> Tensor:
    """Return where the ids of several rows lie in the flattened logits."""
    places = np.concatenate([row_ids + row * logits.stride(0) for row, row_ids in ids])
    return torch.from_numpy(places).to(logits.device)


def _column(logits: Tensor, values: list[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).to(logits.device)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _counts(params: SamplingParams, prompt: Ids, output: Ids) -> TokenCounts | None:
    if not _has_penalties(params):
        return None
    return TokenCounts(prompt if params.repetition_penalty != 1.0 else _NO_IDS, output)


def _banned_ids(params: SamplingParams, vocab_size: int) -> Ids:
    """What must not be sampled before `min_tokens` are out: every end and stop token."""
    if params.min_tokens == 0:
        return _NO_IDS
    banned = {*params.eos_token_ids, *params.stop_token_ids}
    # A request that may only end has nothing else to sample: then the allowed ids win.
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        return _NO_IDS
    return _ids_below(vocab_size, sorted(banned))


def _ids_below(vocab_size: int, token_ids: Sequence[int]) -> Ids:
    """Leave out ids that the model does not have: a generation config may list such end tokens."""
    return np.array([i for i in token_ids if i < vocab_size], np.int64)

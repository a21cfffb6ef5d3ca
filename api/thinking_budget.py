"""`thinking_token_budget`: how long a model may think, by the tokens that mark its thoughts. Used
by the routes; workers count the tokens and end the thought."""

from collections.abc import Sequence

import msgspec

from api.markup import Markup
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from engine.errors import UnsupportedFieldError
from engine.sampling_params import ThinkingBudget

_FIELD = "thinking_token_budget"


def can_be_kept(markup: Markup, tokenizer: Tokenizer) -> bool:
    """Whether this model's thoughts can be ended."""
    return markup.thoughts is not None and tokenizer.token_id(markup.thoughts.end) is not None


def make(max_tokens: int | None, markup: Markup, tokenizer: Tokenizer) -> ThinkingBudget | None:
    """The budget of a request.

    Args:
        max_tokens: the field; None or -1: no budget.
        markup: how the model marks its thoughts.
        tokenizer: of the model.

    Raises:
        UnsupportedFieldError: nobody knows where its thoughts end, or no single token ends them.
    """
    if max_tokens is None or max_tokens == -1:
        return None
    if markup.thoughts is None:
        raise UnsupportedFieldError(
            f"{_FIELD} is not supported by this server: it needs a start with --reasoning-parser",
            _FIELD,
        )
    end_token_id = tokenizer.token_id(markup.thoughts.end)
    if end_token_id is None:
        raise UnsupportedFieldError(
            f"{_FIELD} is not supported by this server: {markup.thoughts.end} is no token of this"
            " model",
            _FIELD,
        )
    start = tokenizer.encode(markup.thoughts.start, add_special_tokens=False)
    return ThinkingBudget(max_tokens, tuple(start), end_token_id, markup.thoughts.is_always_open)


def for_prompt(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """The same for a prompt that is nobody's conversation: whether its last thought is open shows
    in its tokens."""
    budget = params.thinking_budget
    if budget is None:
        return params
    start = budget.start_token_ids
    for place in range(len(token_ids) - 1, -1, -1):
        if token_ids[place] == budget.end_token_id:
            return opened(params, False)
        if tuple(token_ids[place : place + len(start)]) == start:
            return opened(params, True)
    return params


def opened(params: SamplingParams, is_open: bool) -> SamplingParams:
    """The same for an answer that begins inside a thought, or outside."""
    budget = params.thinking_budget
    if budget is None or budget.is_open == is_open:
        return params
    budget = msgspec.structs.replace(budget, is_open=is_open)
    return msgspec.structs.replace(params, thinking_budget=budget)

"""What a request must be to be let in: checked on the engine core's input thread, before it exists
for the scheduler.

The API server has checked most of this and names fields in the client's words; here stands what
protects the engine core and its neighbours' streams from a peer that did not. What can be told
without the model, such as an array's type or a time that is none, `wire` has refused already.
"""

import numpy as np

from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from engine.wire import EngineCoreRequest

_NOT_SERVED_YET = ("mm_features", "pooling_params", "lora_request", "prompt_embeds")
"""On the wire, but no engine core of this version can serve them."""


def check(message: EngineCoreRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise RequestError unless the engine core can serve `message` to its end."""
    for name in _NOT_SERVED_YET:
        value = getattr(message, name)
        if value is not None and (not isinstance(value, list) or value):
            raise UnsupportedFieldError(f"{name} is not supported by this engine", name)
    if message.sampling_params is None:
        raise InvalidRequestError("sampling_params are missing", "sampling_params")
    message.sampling_params.check_vocabulary(vocab_size)
    num_prompt_tokens = _check_tokens("prompt_token_ids", message.prompt_token_ids, vocab_size)
    num_output_tokens = 0
    if message.output_token_ids is not None and message.output_token_ids.size:
        num_output_tokens = _check_tokens("output_token_ids", message.output_token_ids, vocab_size)
    max_tokens = message.sampling_params.max_tokens
    _check_length(num_prompt_tokens, num_output_tokens, max_tokens, max_model_len)


def _check_tokens(name: str, token_ids: np.ndarray | None, vocab_size: int) -> int:
    """The number of tokens, which must be some, and known to the model."""
    if token_ids is None or token_ids.size == 0:
        raise InvalidRequestError(f"{name} must hold at least one token", name)
    largest = int(token_ids.max())
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{name} holds token id {largest}; this model's ids end at {vocab_size - 1}", name
        )
    return int(token_ids.size)


def _check_length(
    num_prompt_tokens: int, num_output_tokens: int, max_tokens: int | None, max_model_len: int
) -> None:
    """Room for one more token. The KV cache holds `max_model_len` tokens (`engine.kv_sizing`), so
    no request that passes can wait for blocks for ever."""
    if num_prompt_tokens + num_output_tokens >= max_model_len:
        output = f" and {num_output_tokens} of output" if num_output_tokens else ""
        raise ContextLengthError(
            f"this server's maximum length is {max_model_len} tokens; {num_prompt_tokens} tokens of"
            f" prompt{output} leave no room for another",
            "prompt_token_ids",
        )
    if max_tokens is not None and num_output_tokens >= max_tokens:
        raise InvalidRequestError(
            f"output_token_ids holds {num_output_tokens} tokens already, max_tokens is"
            f" {max_tokens}: nothing is left to generate",
            "output_token_ids",
        )

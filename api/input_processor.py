"""A prompt and its sampling parameters as requests to an engine core. Pure but for random ids.

Used by the HTTP routes and by `LLM`. Everything that can be wrong with a prompt is found here,
before anything is sent: the engine never sees it, and neighbours never notice.
"""

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from api.ids import new_id
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from api.truncation import Truncation
from engine.codec import Array
from engine.errors import ContextLengthError, InvalidRequestError
from engine.wire import EngineCoreRequest

_MAX_ID_CHARS = 64

DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's reference; less where the model's length leaves less."""


class InputProcessor:
    """Checks and packs the prompts of one model.

    Args:
        tokenizer: of that model.
        max_model_len: longest prompt plus output, as the engine core has fitted it.
        vocab_size: rows of the embedding, as the engine core reports them.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        # A generation_config.json may be that of a larger sibling.
        self._eos_token_ids = tuple(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._max_chars = max_model_len * tokenizer.max_token_chars
        begin = tokenizer.special_tokens.get("bos_token")
        self._begin_token_id = tokenizer.token_id(begin) if begin is not None else None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        param: str = "prompt",
        truncation: Truncation | None = None,
        num_output_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of a prompt given as text. Long texts take seconds: off the event loop.

        Args:
            text: a prompt, or a rendered chat.
            add_special_tokens: False for a rendered chat.
            split_special_tokens: those that are written out are text like any other. False for a
                rendered chat, in which they are marked.
            param: what the client calls the field, for errors.
            truncation: what is to be left of it. A begin token stays.
            num_output_tokens: room for the answer; `truncate`.

        Raises:
            InvalidRequestError: the text is empty or no valid Unicode.
            ContextLengthError: the text is too long, however it is cut into tokens.
        """
        if truncation is not None:
            text = truncation.cut_text(text, self._max_chars)
        if text and (
            token_ids := self.tokenize(
                text,
                add_special_tokens=add_special_tokens,
                split_special_tokens=split_special_tokens,
                param=param,
            )
        ):
            has_begin = token_ids[0] == self._begin_token_id
            return self.truncate(token_ids, truncation, num_output_tokens, num_kept=int(has_begin))
        raise InvalidRequestError(f"{param} must not be empty", param)

    def tokenize(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool, param: str
    ) -> list[int]:
        """The same of a text that need not be a prompt: it may be empty."""
        if len(text) > self._max_chars:  # seconds of work for nothing, if it were encoded
            raise self._too_long(f"{param} has {len(text)} characters", param)
        if split_special_tokens:
            text = self._tokenizer.typed_special_tokens.mark(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def truncate(
        self,
        token_ids: list[int],
        truncation: Truncation | None,
        num_output_tokens: int | None = None,
        num_kept: int = 0,
    ) -> list[int]:
        """What is left of a prompt.

        Args:
            token_ids: of the prompt.
            truncation: None: all is left.
            num_output_tokens: `max_tokens` of the request, if it has one: -1 leaves so much room.
            num_kept: the first so many tokens stay in any case.
        """
        if truncation is None:
            return token_ids
        room = DEFAULT_COMPLETION_TOKENS if num_output_tokens is None else num_output_tokens
        return truncation.cut(token_ids, truncation.limit(self.max_model_len, room), num_kept)

    def check_length(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise ContextLengthError unless so long a prompt leaves room for a token."""
        if num_tokens >= self.max_model_len:
            lengths = num_tokens, self.max_model_len - 1
            raise self._too_long(f"{param} has {num_tokens} tokens", param, lengths)

    def _too_long(
        self, what: str, param: str, lengths: tuple[int, int] | None = None
    ) -> ContextLengthError:
        # Clients look for these words, which are OpenAI's and vLLM's, to tell a conversation that
        # must be cut from a mistake.
        limit = f"this model's maximum context length is {self.max_model_len} tokens"
        message = f"{limit}, prompt and output together; {what}"
        return ContextLengthError(message, param, lengths)

    def make_requests(
        self,
        prompt_token_ids: Sequence[int] | Array,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        default_max_tokens: int | None = None,
        cuts_max_tokens: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        param: str = "prompt",
    ) -> list[EngineCoreRequest]:
        """One request for each of the `n` continuations.

        Args:
            prompt_token_ids: from `encode`, or as the client gave them.
            params: as the client gave them.
            request_id: the client's name for it, kept as the start of our own unique ids.
            default_max_tokens: stands in for `max_tokens` None, as far as the model's length
                allows; None: all that it allows.
            cuts_max_tokens: a `max_tokens` beyond the model's length means up to it, rather than an
                error.
            priority: lower runs first, with the priority policy.
            cache_salt: shares cached prefixes only with requests of the same salt.
            param: what the client calls the prompt, for errors.

        Raises:
            InvalidRequestError: no tokens, or ids that the model does not have, in the prompt or
                in the parameters.
            ContextLengthError: prompt and output do not fit the model's length.
        """
        prompt = self._check_prompt(prompt_token_ids, param)
        max_tokens = self._fit_max_tokens(
            len(prompt), params.max_tokens, default_max_tokens, cuts_max_tokens, param
        )
        params.check_vocabulary(self.vocab_size)
        bad_words = self._encode_bad_words(params.bad_words) if params.bad_words else ()
        unique_id = _make_unique(request_id)
        return [
            EngineCoreRequest(
                request_id=unique_id if params.n == 1 else f"{unique_id}-{choice}",
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=msgspec.structs.replace(
                    params.for_engine(choice),
                    max_tokens=max_tokens,
                    eos_token_ids=self._eos_token_ids,
                    bad_words_token_ids=bad_words,
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=cache_salt,
                data_parallel_rank=None,
                priority=priority,
            )
            for choice in range(params.n)
        ]

    def _encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that must not be completed: each word as it stands at the start
        of a text and behind a space.

        vLLM leaves the second out where it has another number of tokens, and so lets such words
        through.
        """
        stripped = [word.lstrip() or word for word in words]
        spellings = [*stripped, *(f" {word}" for word in stripped)]
        encoded = self._tokenizer.encode_batch(spellings, add_special_tokens=False)
        for word, token_ids in zip(words, encoded, strict=False):
            if not token_ids:
                raise InvalidRequestError(
                    f"bad_words holds {word[:40]!r}, which this model has no tokens for",
                    "bad_words",
                )
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _check_prompt(self, token_ids: Sequence[int] | Array, param: str) -> Array:
        """The prompt as it travels, if it is one."""
        if len(token_ids) == 0:
            raise InvalidRequestError(f"{param} must not be empty", param)
        # Before the ids are looked at: a list may be as long as a body allows.
        self.check_length(len(token_ids), param)
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        for token_id in token_ids:
            # `type`, not isinstance: True is an int to Python, but no token id.
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param} holds {str(token_id)[:40]}, which is no token id: this model's are"
                    f" from 0 to {self.vocab_size - 1}",
                    param,
                )
        return np.array(token_ids, dtype="<u4")

    def _fit_max_tokens(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        default_max_tokens: int | None,
        cuts_max_tokens: bool,
        param: str,
    ) -> int:
        """The number of output tokens to ask the engine for."""
        room = self.max_model_len - num_prompt_tokens
        if max_tokens is None:
            return room if default_max_tokens is None else min(room, default_max_tokens)
        if max_tokens > room and not cuts_max_tokens:
            raise self._too_long(
                f"{param} has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: lower"
                f" max_tokens to {room} or shorten the prompt",
                param,
            )
        return min(max_tokens, room)


def _make_unique(request_id: str | None) -> str:
    """An id of ours: no two are equal, whatever clients send."""
    return new_id(f"{request_id[:_MAX_ID_CHARS]}-" if request_id else "", num_bits=64)

"""POST /tokenize and /detokenize: a text or a conversation as the model's tokens, and back.

As in vLLM they are not below /v1. Nothing is generated and no engine is asked, so a text may be
longer than the model's length; what no model could take is refused.
"""

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import body, openapi_fields, text_call
from api.body import decode_field
from api.conversation import Conversation
from api.fields import KNOWN_IN_CHAT, UNSUPPORTED_IN_CHAT
from api.limits import MAX_DETOKENIZED
from api.protocol import ChatBody
from api.routes import chat
from api.routing import Route
from api.service import LoadedModel, Service
from engine.errors import InvalidRequestError

_NULL = msgspec.Raw(b"null")


class TokenizeBody(ChatBody, kw_only=True):
    """POST /tokenize: a text, or what one would send to /v1/chat/completions."""

    prompt: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary spells them; null unless asked for."""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: msgspec.Raw
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


_KNOWN_IN_TOKENIZE = KNOWN_IN_CHAT | {"prompt", "return_token_strs"}
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_TEXT = msgspec.json.Decoder(str).decode
_TOKENS = msgspec.json.Decoder(list[int]).decode


def routes(service: Service) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        raw = await service.bodies.read(request)
        asked, ignored = body.decode(raw, _TOKENIZE, _KNOWN_IN_TOKENIZE, UNSUPPORTED_IN_CHAT)
        if (asked.prompt == _NULL) == (asked.messages == _NULL):
            raise InvalidRequestError("give either prompt, a text, or messages", "prompt")
        if asked.messages == _NULL:
            service.check_model_name(asked.model)
            call = partial(_tokenize_text, asked)
        else:
            call = partial(_tokenize_messages, asked, chat.read_conversation(service, asked))
        headers = body.ignored_header(ignored)
        return await text_call.respond(service, request, call, len(raw), headers)

    async def detokenize(request: Request) -> Response:
        raw = await service.bodies.read(request)
        asked, ignored = body.decode(raw, _DETOKENIZE, DetokenizeBody.__struct_fields__, {})
        service.check_model_name(asked.model)
        headers = body.ignored_header(ignored)
        return await text_call.respond(
            service, request, partial(_detokenize, asked.tokens), len(raw), headers
        )

    return [
        Route(
            ("POST",),
            "/tokenize",
            tokenize,
            summary="The tokens of a text or of a conversation",
            body=TokenizeBody,
            raw_fields={**openapi_fields.chat(service.config.max_n), "prompt": str},
            example={"prompt": "The sea is"},
            answer=TokenizeAnswer,
        ),
        Route(
            ("POST",),
            "/detokenize",
            detokenize,
            summary="The text of tokens",
            body=DetokenizeBody,
            raw_fields={"tokens": openapi_fields.TOKENS},
            example={"tokens": [1, 2, 3]},
            answer=DetokenizeAnswer,
        ),
    ]


def _tokenize_text(asked: TokenizeBody, model: LoadedModel) -> TokenizeAnswer:
    text = decode_field(_TEXT, asked.prompt, "prompt")
    token_ids = model.inputs.tokenize(
        text,
        add_special_tokens=asked.add_special_tokens is not False,
        split_special_tokens=bool(asked.split_special_tokens),
        param="prompt",
    )
    return _tokens(asked, model, token_ids)


def _tokenize_messages(
    asked: TokenizeBody, conversation: Conversation, model: LoadedModel
) -> TokenizeAnswer:
    return _tokens(asked, model, conversation.render(model).token_ids)


def _tokens(asked: TokenizeBody, model: LoadedModel, token_ids: list[int]) -> TokenizeAnswer:
    names = None
    if asked.return_token_strs:
        names = [model.tokenizer.token_name(token_id) or "" for token_id in token_ids]
    return TokenizeAnswer(len(token_ids), model.max_model_len, token_ids, names)


def _detokenize(raw: msgspec.Raw, model: LoadedModel) -> DetokenizeAnswer:
    """Special tokens show: what /tokenize has added comes back."""
    if bytes(raw).count(b",") >= MAX_DETOKENIZED:
        raise InvalidRequestError(f"tokens holds over {MAX_DETOKENIZED} token ids", "tokens")
    token_ids = decode_field(_TOKENS, raw, "tokens")
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= model.inputs.vocab_size):
        raise _unknown_token(token_ids, model.inputs.vocab_size)
    return DetokenizeAnswer(model.tokenizer.decode(token_ids, skip_special_tokens=False))


def _unknown_token(token_ids: list[int], vocab_size: int) -> InvalidRequestError:
    """Names the first id that the model does not have."""
    place, token_id = next(
        (place, token_id)
        for place, token_id in enumerate(token_ids)
        if not 0 <= token_id < vocab_size
    )
    return InvalidRequestError(
        f"tokens[{place}] is {str(token_id)[:40]}, which is no token id: this model's are from 0 to"
        f" {vocab_size - 1}",
        f"tokens[{place}]",
    )

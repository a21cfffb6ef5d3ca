"""The answer to a request as Anthropic's message, whole or as the events of a stream.

    message_start, ping
    content_block_start, content_block_delta…, content_block_stop      for each block
    message_delta, message_stop

A block is a run of text, of thoughts, or one call of a tool; a change of kind ends it.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from api import answer, errors, sse
from api.anthropic.protocol import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    End,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from api.generate import Batch, Generation
from api.message_parser import MessageEvent, Reasoning
from api.message_plan import MessageReader
from api.output_processor import OutputDelta
from api.tools.base import Arguments, CallStart, Text

SIGNATURE = "unsigned"
"""Of thoughts. Clients send it back with them, and some leave out thoughts that have none."""

INVALID_JSON = "INVALID_JSON"
"""What a model has written as the input of a tool, where that is no JSON object, is in an object
under this name, which Anthropic's documentation has for it."""

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class MessageFormat:
    """The answer to one request.

    Args:
        answer_id: of the message.
        model: its name.
        max_tokens: as the client gave it; the engine may have been asked for less.
        generation: of one sequence.
        reader: of its text.
        is_plain: there is nothing in the text that it would find.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        max_tokens: int,
        generation: Generation,
        reader: MessageReader,
        *,
        is_plain: bool,
    ) -> None:
        self._id = answer_id
        self._model = model
        self._max_tokens = max_tokens
        self._generation = generation
        self._reader = reader
        self._is_plain = is_plain
        self._blocks = BlockEvents(reader)
        self._is_begun = False
        self._end = End("end_turn", None)

    def chunks(self, batch: Batch) -> bytes:
        events = []
        if not self._is_begun:
            self._is_begun = True
            events += [_event(MessageStart(self._message([], None))), _event(Ping())]
        events += [self._news(delta) for _, delta in batch]
        return b"".join(events)

    def last_chunks(self) -> bytes:
        return _event(MessageDelta(self._end, self._usage())) + _event(MessageStop())

    def failed(self, failure: errors.Failure) -> bytes:
        return sse.named_event("error", failure.anthropic_body)

    async def whole(self) -> Message:
        [part] = await answer.collect(self._generation)
        news = self._reader.read(
            "".join(part.text), is_last=True, is_cut=part.finish_reason == "length"
        )
        content = blocks(news, self._reader)
        is_whole = not (content and _is_broken(content[-1]))
        return self._message(content, self._end_of(part.finish_reason, part.stop_reason, is_whole))

    def _news(self, delta: OutputDelta) -> bytes:
        is_last = delta.finish_reason is not None
        if self._is_plain and not is_last:
            return self._blocks.add_text(delta.text) if delta.text else b""
        is_cut = delta.finish_reason == "length"
        news = self._reader.read(delta.text, is_last=is_last, is_cut=is_cut)
        events = [self._blocks.add(it) for it in news]
        if is_last:
            events.append(self._blocks.end())
            is_whole = _is_object(self._blocks.arguments)
            self._end = self._end_of(delta.finish_reason, delta.stop_reason, is_whole)
        return b"".join(events)

    def _message(self, content: list[Block], end: End | None) -> Message:
        return Message(
            self._id,
            self._model,
            content,
            None if end is None else end.stop_reason,
            None if end is None else end.stop_sequence,
            self._usage(),
        )

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return Usage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)

    def _end_of(
        self, finish_reason: str | None, stop_reason: int | str | None, is_whole: bool
    ) -> End:
        """Why it has ended. `is_whole`: the input of the last call, if there is one, is JSON. A
        call that a stop sequence has cut off must not be run."""
        if finish_reason == "length":
            return End(self._length_reason(), None)
        if isinstance(stop_reason, str) and not (self._reader.num_calls and is_whole):
            return End("stop_sequence", stop_reason)
        return End("tool_use" if self._reader.num_calls else "end_turn", None)

    def _length_reason(self) -> StopReason:
        num_tokens = self._generation.choices[0].processor.num_output_tokens
        return "max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded"


class BlockEvents:
    """The events of the blocks, as what they hold becomes known."""

    def __init__(self, reader: MessageReader) -> None:
        self.arguments = ""
        """Of the latest call."""
        self._reader = reader
        self._index = -1
        self._kind: type[MessageEvent] | None = None
        """Of the block that is open: what it is made of."""
        delta = "content_block_delta"
        self._texts = sse.TextEvents(lambda i, text: _delta(i, TextDelta(text)), delta)
        self._thoughts = sse.TextEvents(lambda i, text: _delta(i, ThinkingDelta(text)), delta)
        self._inputs = sse.TextEvents(lambda i, text: _delta(i, InputJsonDelta(text)), delta)

    def add(self, news: MessageEvent) -> bytes:
        match news:
            case Text(text):
                return self.add_text(text)
            case Reasoning(text):
                begin = self._begin(Reasoning, ThinkingBlock("", ""))
                return begin + self._thoughts.event(self._index, text)
            case CallStart(name):
                self.arguments = ""
                call = ToolUseBlock(self._reader.new_call_id(), name, {})
                return self.end() + self._begin(Arguments, call)
            case Arguments(text):
                self.arguments += text
                return self._inputs.event(self._index, text)

    def add_text(self, text: str) -> bytes:
        begin = b"" if self._kind is Text else self._begin(Text, TextBlock(""))
        return begin + self._texts.event(self._index, text)

    def end(self) -> bytes:
        """End the block that is open, if one is."""
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        stop = _event(ContentBlockStop(self._index))
        return self._signature() + stop if kind is Reasoning else stop

    def _begin(self, kind: type[MessageEvent], block: Block) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if self._kind is kind:
            return b""
        end = self.end()
        self._kind = kind
        self._index += 1
        return end + _event(ContentBlockStart(self._index, block))

    def _signature(self) -> bytes:
        return _event(ContentBlockDelta(self._index, SignatureDelta(SIGNATURE)))


def blocks(events: Iterable[MessageEvent], reader: MessageReader) -> list[Block]:
    """The blocks of a whole answer."""
    found: list[Block] = []
    arguments: list[str] = []
    for event in events:
        last = found[-1] if found else None
        match event:
            case Text(text) if isinstance(last, TextBlock):
                last.text += text
            case Text(text):
                found.append(TextBlock(text))
            case Reasoning(text) if isinstance(last, ThinkingBlock):
                last.thinking += text
            case Reasoning(text):
                found.append(ThinkingBlock(text, SIGNATURE))
            case CallStart(name):
                arguments = []
                found.append(ToolUseBlock(reader.new_call_id(), name, arguments))
            case Arguments(text):
                arguments.append(text)
    for block in found:
        if isinstance(block, ToolUseBlock):
            block.input = input_of("".join(block.input))
    return found


def input_of(arguments: str) -> dict[str, Any]:
    """What a model has written as the input of a tool. No input is an empty one."""
    if not arguments:
        return {}
    try:
        return _decode_object(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: arguments}


def _is_object(arguments: str) -> bool:
    return INVALID_JSON not in input_of(arguments)


def _is_broken(block: Block) -> bool:
    return isinstance(block, ToolUseBlock) and INVALID_JSON in block.input


def _delta(index: int, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> ContentBlockDelta:
    return ContentBlockDelta(index, delta)


def _event(body: msgspec.Struct) -> bytes:
    return sse.named_event(str(body.__struct_config__.tag), body)

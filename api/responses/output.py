"""The output items of one answer, made of its text as it comes. Pure.

    text -> MessageReader -> thoughts, texts, calls -> items, and an event for each change

At any time at most one item is open. It becomes complete when something of another kind begins, or
the answer ends.
"""

from collections.abc import Callable, Sequence

from api import logprobs
from api.answer_bodies import TokenLogprob
from api.ids import new_secret_id
from api.message_parser import MessageEvent, Reasoning
from api.message_plan import MessageReader
from api.output_processor import OutputDelta
from api.responses.events import EventWriter
from api.responses.items import (
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from api.responses.packed_thought import pack
from api.responses.protocol import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from api.responses.waiting_tokens import WaitingTokens
from api.tools.base import Arguments, CallStart, Text


class OutputWriter:
    """Follows the text of one answer.

    Args:
        reader: tells thoughts, texts and calls apart; None: all is text.
        events: is told of every change.
        num_bytes: how many bytes a token adds to the text, by its id.
        packs_thoughts: thoughts are there a second time, for clients that carry them so.
    """

    def __init__(
        self,
        reader: MessageReader | None,
        events: EventWriter,
        num_bytes: Callable[[int], int],
        *,
        packs_thoughts: bool = False,
    ) -> None:
        self.items: list[OutputItem] = []
        """The last one may be open: not all of its text is in it."""
        self.num_reasoning_tokens = 0
        self._reader = reader
        self._packs_thoughts = packs_thoughts
        self._events = events
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        """Texts of the open item."""
        self._logprobs: list[TokenLogprob] = []
        """Of the open item, if it is a message."""
        self._waiting = WaitingTokens(num_bytes)
        """Of a text that is read."""
        self._held: list[TokenLogprob] = []
        """Of a text that is not: those of tokens that are half a character."""

    def push(self, delta: OutputDelta) -> None:
        """Take in what is new."""
        if self._reader is not None:
            self._push_parts(self._reader, delta)
            return
        self._held += logprobs.for_chat(delta.logprobs or ()).content
        if delta.text:
            held, self._held = self._held, []
            self._add_text(delta.text, held)

    def finish(self, status: Status) -> None:
        """The answer has ended.

        Args:
            status: of the item that is open, if one is.
        """
        if not self.items:  # clients look for a text
            self._begin(Message(new_secret_id("msg_"), "assistant", [], "in_progress"))
        self._close(status)

    def abandon(self) -> None:
        """Nothing more comes, and there are no more events: what there is of the open item is put
        into it."""
        if self._open is not None:
            self._fill(self._open)
            self._open.status = "incomplete"
            self._open = None

    def _push_parts(self, reader: MessageReader, delta: OutputDelta) -> None:
        self._waiting.push(delta)
        is_last, is_cut = delta.finish_reason is not None, delta.finish_reason == "length"
        for event in reader.read(delta.text, is_last=is_last, is_cut=is_cut):
            self._add(reader, event)

    def _add(self, reader: MessageReader, event: MessageEvent) -> None:
        match event:
            case Text(text):
                self._add_text(text, self._waiting.take(text).logprobs)
            case Reasoning(text):
                self.num_reasoning_tokens += self._waiting.take(text).count
                self._add_reasoning(text)
            case CallStart(name):
                call_id = reader.new_call_id()
                self._begin(FunctionCall(new_secret_id("fc_"), call_id, name, "", "in_progress"))
            case Arguments(text):
                self._waiting.take(text)
                self._add_arguments(text)

    def _add_text(self, text: str, news: Sequence[TokenLogprob]) -> None:
        item = self._open
        if not isinstance(item, Message):
            item = Message(new_secret_id("msg_"), "assistant", [], "in_progress")
            self._begin(item)
        self._pieces.append(text)
        self._logprobs += news
        self._events.add_delta(TextDelta(item.id, self._index, text, list(news)))

    def _add_reasoning(self, text: str) -> None:
        item = self._open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(new_secret_id("rs_"), status="in_progress")
            self._begin(item)
        self._pieces.append(text)
        self._events.add_delta(ReasoningDelta(item.id, self._index, text))

    def _add_arguments(self, text: str) -> None:
        item = self._open
        assert isinstance(item, FunctionCall)
        self._pieces.append(text)
        self._events.add_delta(ArgumentsDelta(item.id, self._index, text))

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _begin(self, item: OutputItem) -> None:
        self._close("completed")
        self.items.append(item)
        self._open = item
        self._pieces, self._logprobs = [], []
        self._events.add(ItemAdded(self._index, item))
        if (part := _empty_part(item)) is not None:
            self._events.add(PartAdded(item.id, self._index, part))

    def _close(self, status: Status) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        self._fill(item)
        item.status = status
        for event in _last_events(item, self._index):
            self._events.add(event)
        self._events.add(ItemDone(self._index, item))

    def _fill(self, item: OutputItem) -> None:
        """Put the text into its item."""
        text = "".join(self._pieces)
        match item:
            case Message():
                item.content = [OutputText(text, logprobs=self._logprobs)]
            case ReasoningItem():
                item.content = [ReasoningText(text)]
                item.encrypted_content = pack(text) if self._packs_thoughts else None
            case FunctionCall():
                item.arguments = text


def _empty_part(item: OutputItem) -> OutputText | ReasoningText | None:
    match item:
        case Message():
            return OutputText("")
        case ReasoningItem():
            return ReasoningText("")
        case FunctionCall():
            return None


def _last_events(
    item: OutputItem, index: int
) -> Sequence[TextDone | ReasoningDone | ArgumentsDone | PartDone]:
    """What is said of a complete item before that it is complete."""
    match item:
        case Message(content=[OutputText() as part]):
            done = TextDone(item.id, index, part.text, part.logprobs)
            return done, PartDone(item.id, index, part)
        case ReasoningItem(content=[thought]):
            return (
                ReasoningDone(item.id, index, thought.text),
                PartDone(item.id, index, thought),
            )
        case FunctionCall():
            return (ArgumentsDone(item.id, index, item.name, item.arguments),)
        case _:
            raise AssertionError(item)

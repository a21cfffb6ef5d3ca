"""Responses that may be asked for again, and conversations that may go on. Pure: kept in memory, so
they end with the process.

Bounded in number and bytes; whatever has not been asked for the longest goes first. Items are
shared: a conversation of a hundred responses holds each of its texts once.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from api.ids import new_secret_id
from api.responses.items import Item

_ITEM_BYTES = 256
"""What an item takes besides its texts, in one response that holds it: generously."""

_ENTRY_BYTES = 4096

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended."""

    id: str
    input: Sequence[Item]
    """All that was said before, earlier responses included."""

    output: Sequence[Item]
    body: bytes
    """The response as it is answered."""

    can_go_on: bool
    """Others may follow it: it has not failed."""

    is_background: bool = False
    events: Sequence[bytes] = ()
    """Those of its stream, where clients may come back to it."""

    @property
    def items(self) -> list[Item]:
        """The whole conversation."""
        return [*self.input, *self.output]


class ResponseStore:
    """The responses of one API server.

    Args:
        max_responses: kept at most; 0: none.
        max_bytes: taken at most, counted by the texts.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._own_bytes: dict[str, int] = {}
        self._users: dict[int, tuple[int, int]] = {}
        """Of each item, by its identity: how many responses hold it, and its bytes. They keep it
        alive, so no other has its identity."""
        self._written: dict[str, Item] = {}
        """What the models wrote, by the names that it got here. Those that clients give to items
        are not unique, and not secret."""
        self._tag = secrets.token_hex(4)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    @property
    def bounds(self) -> str:
        """How much is kept, in words."""
        return f"{self._max_responses} responses and {self._max_bytes >> 20} MiB at most"

    def num_item_bytes(self, response: StoredResponse) -> int:
        """What the texts of a response that is in the store take."""
        return sum(self._users[id(item)][1] for item in _items(response))

    def new_id(self) -> str:
        """A name for a response. Whoever knows it may read the response, so nobody can guess it."""
        return new_secret_id(f"resp_{self._tag}")

    def is_foreign(self, response_id: str) -> bool:
        """Whether a name may have been given by another process."""
        return not response_id.startswith(f"resp_{self._tag}")

    def put(self, response: StoredResponse) -> None:
        """Keep it, and as many of the others as there is room for."""
        self.remove(response.id)
        own = _ENTRY_BYTES + len(response.body) + sum(map(len, response.events))
        for item in _items(response):
            own += _ITEM_BYTES
            self._hold(item)
        self._written.update((item.id, item) for item in response.output)
        self.num_bytes += own
        self._entries[response.id] = response
        self._own_bytes[response.id] = own
        while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, if it is still there; which makes it the last to go."""
        response = self._entries.get(response_id)
        if response is not None:
            self._entries.move_to_end(response_id)
        return response

    def find_item(self, item_id: str) -> Item | None:
        """Something that a model wrote in one of the responses, by its name."""
        return self._written.get(item_id)

    def remove(self, response_id: str) -> bool:
        """Forget it. False: it was not there."""
        response = self._entries.pop(response_id, None)
        if response is None:
            return False
        self.num_bytes -= self._own_bytes.pop(response_id)
        for item in _items(response):
            self._release(item)
        for item in response.output:
            self._written.pop(item.id, None)
        return True

    def validate(self) -> None:
        """Check all that must hold between calls; for tests."""
        held = [item for response in self._entries.values() for item in _items(response)]
        assert self._users.keys() == {id(item) for item in held}
        assert sum(count for count, _ in self._users.values()) == len(held)
        shared = sum(num_bytes for _, num_bytes in self._users.values())
        assert self.num_bytes == shared + sum(self._own_bytes.values())
        assert self._own_bytes.keys() == self._entries.keys()
        written = {item.id for response in self._entries.values() for item in response.output}
        assert self._written.keys() == written
        assert len(self._entries) <= self._max_responses
        assert self.num_bytes <= self._max_bytes or not self._entries

    def _hold(self, item: Item) -> None:
        count, num_bytes = self._users.get(id(item), (0, 0))
        if not count:
            num_bytes = len(_encode(item))
            self.num_bytes += num_bytes
        self._users[id(item)] = count + 1, num_bytes

    def _release(self, item: Item) -> None:
        count, num_bytes = self._users[id(item)]
        if count > 1:
            self._users[id(item)] = count - 1, num_bytes
        else:
            del self._users[id(item)]
            self.num_bytes -= num_bytes


def _items(response: StoredResponse) -> Iterable[Item]:
    yield from response.input
    yield from response.output

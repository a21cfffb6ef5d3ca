"""What GET requests below /v1/responses ask for behind the `?`: pages of items, and events from
anywhere on. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from api.limits import MAX_LISTED_ITEMS
from api.responses.items import Item
from api.responses.protocol import ItemList
from engine.errors import InvalidRequestError

DEFAULT_LIMIT = 20
_MAX_DIGITS = 9

PageSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_ITEMS)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=10**_MAX_DIGITS)]
"""For `/openapi.json`: who reads them checks them."""


def page(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    """One page of a list, the latest items first unless `order` says asc.

    Raises:
        InvalidRequestError: `limit`, `order` or `after` is out of bounds.
    """
    limit = _read_int(query, "limit", DEFAULT_LIMIT)
    if not 1 <= limit <= MAX_LISTED_ITEMS:
        raise InvalidRequestError(
            f"limit must be from 1 to {MAX_LISTED_ITEMS}, not {limit}", "limit"
        )
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, not {order[:40]!r}", "order")
    ordered = items if order == "asc" else items[::-1]
    rest = ordered[_place_after(ordered, query.get("after")) :]
    shown = list(rest[:limit])
    return ItemList(
        shown,
        first_id=shown[0].id if shown else "",
        last_id=shown[-1].id if shown else "",
        has_more=len(rest) > limit,
    )


def read_stream_query(query: Mapping[str, str]) -> tuple[bool, int]:
    """Whether events are asked for, and how many of them the client has.

    Raises:
        InvalidRequestError: `stream` or `starting_after` is malformed.
    """
    stream = query.get("stream", "false").lower()
    if stream not in ("true", "false"):
        raise InvalidRequestError(f"stream must be true or false, not {stream[:40]!r}", "stream")
    starting_after = _read_int(query, "starting_after", -1)
    if starting_after >= 0 and stream == "false":
        raise InvalidRequestError("starting_after needs stream=true", "starting_after")
    return stream == "true", starting_after + 1


def _place_after(items: Sequence[Item], item_id: str | None) -> int:
    if item_id is None:
        return 0
    for place, item in enumerate(items, start=1):
        if item.id == item_id:
            return place
    raise InvalidRequestError(f"after: there is no item {item_id[:80]!r}", "after")


def _read_int(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequestError(f"{name} must be a number, not {text[:40]!r}", name)
    return int(text)

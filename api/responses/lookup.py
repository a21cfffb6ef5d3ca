"""Finds responses by their ids, or says why they are not there. Used by the route."""

from collections.abc import Sequence

from api.responses.background import History, Runs
from api.responses.items import Item
from api.responses.store import ResponseStore, StoredResponse
from engine.errors import InvalidRequestError, NotFoundError

_MAX_SHOWN_CHARS = 80


class ResponseNotFoundError(NotFoundError):
    """The response is not here: never was, or not any more."""

    code = "response_not_found"


class PreviousResponseNotFoundError(NotFoundError):
    """The same, of the one that a request continues."""

    code = "previous_response_not_found"


class Lookup:
    """The responses of one API server.

    Args:
        store: those that have ended.
        runs: those that run in the background.
    """

    def __init__(self, store: ResponseStore, runs: Runs) -> None:
        self._store = store
        self._runs = runs

    def stored(self, response_id: str) -> StoredResponse:
        """A response that has ended. Raises ResponseNotFoundError."""
        found = self._store.get(response_id)
        if found is None:
            raise ResponseNotFoundError(self._why(response_id), "response_id")
        return found

    def previous(self, response_id: str) -> StoredResponse:
        """A response that another may follow.

        Raises:
            PreviousResponseNotFoundError: it is not here.
            InvalidRequestError: it still runs, or has failed.
        """
        name = "previous_response_id"
        shown = response_id[:_MAX_SHOWN_CHARS]
        if self._runs.get(response_id) is not None:
            raise InvalidRequestError(f"{name}: {shown!r} is still in progress", name)
        found = self._store.get(response_id)
        if found is None:
            raise PreviousResponseNotFoundError(f"{name}: {self._why(response_id)}", name)
        if not found.can_go_on:
            raise InvalidRequestError(f"{name}: {shown!r} has failed or was cancelled", name)
        return found

    def conversation(self, response_id: str) -> Sequence[Item]:
        """What a response was given. Raises ResponseNotFoundError."""
        run = self._runs.get(response_id)
        return run.form.conversation if run is not None else self.stored(response_id).input

    def history(self, response_id: str) -> History:
        """The events of a response's stream.

        Raises:
            ResponseNotFoundError: it is not here.
            InvalidRequestError: its events are not kept.
        """
        run = self._runs.get(response_id)
        if run is not None and run.form.log is not None:
            return run.history
        if run is None and (events := self.stored(response_id).events):
            return History(events, is_over=True)
        raise InvalidRequestError(
            "stream: only responses that were created with background: true and stream: true can"
            " be streamed afterwards",
            "stream",
        )

    def _why(self, response_id: str) -> str:
        """Why it is not here."""
        shown = response_id[:_MAX_SHOWN_CHARS]
        start = f"there is no response {shown!r} here"
        if not self._store.is_on:
            return (
                f"{start}: this server was started with --max-stored-responses 0 and keeps none;"
                " send the whole conversation as input"
            )
        if self._store.is_foreign(response_id):
            return (
                f"{start}: this API server has not made it. Responses are kept in the memory of"
                " the API server that made them, and end with it; where a server has several, a"
                " new connection may reach another. Send the whole conversation as input, or run"
                " with --api-server-count 1"
            )
        return (
            f"{start} any more: it was deleted, or created with store: false, or has made room for"
            f" newer ones: {self._store.bounds}"
        )

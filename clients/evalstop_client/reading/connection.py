"""Requests of a program that reads: each returns the answer's document or raises an ApiError."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from urllib.parse import urlencode

from evalstop_client.errors import ConfirmationNeeded, KeyRefused, NotFound, Rejected, ServiceAway
from evalstop_client.service import Accepted, Answer, Json, Service, Unauthorized, Unavailable

PAGE = 100

Query = Mapping[str, str | int | list[str] | None]
"""Parameters by name; those that are None or empty are left out."""


class Connection:
    """A connection to one service with one key; to be used by one thread at a time."""

    def __init__(self, url: str, key: str, timeout_seconds: float) -> None:
        self.url = url
        self._service = Service(url, key, timeout_seconds)
        weakref.finalize(self, self._service.close)  # nobody closes what is used in one line

    def get(self, path: str, query: Query | None = None) -> Json:
        """GET a path such as `/runs`."""
        given = {name: value for name, value in (query or {}).items() if value not in (None, [])}
        return _document(self._service.get(f"{path}?{urlencode(given, doseq=True)}" if given else path))

    def post(self, path: str, body: Json | None = None) -> Json:
        """POST to a path, with a body where the route takes one."""
        return _done(_document(self._service.send("POST", path, body)))

    def patch(self, path: str, body: Json) -> Json:
        """PATCH what is at a path."""
        return _done(_document(self._service.send("PATCH", path, body)))

    def delete(self, path: str) -> None:
        """DELETE what is at a path."""
        _document(self._service.send("DELETE", path))

    def pages(self, path: str, query: Query, page: int = PAGE) -> Iterator[Json]:
        """The items of a list, whose pages are fetched as they are needed."""
        while True:
            answer = self.get(path, {**query, "limit": page})
            yield from answer["items"]
            if answer["next_cursor"] is None:
                return
            query = {**query, "cursor": answer["next_cursor"]}

    def page_of(self, run_id: str) -> str:
        """The page of a run, where the service does not say it."""
        return self._service.page_of(run_id)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._service.close()


def _done(document: Json) -> Json:
    """The document; raises ConfirmationNeeded where it is a proposal instead of what was asked for."""
    if "proposed_by" in document:
        raise ConfirmationNeeded(f"{document['summary']}: proposal {document['id']}, on the page Overview.")
    return document


def _document(answer: Answer) -> Json:
    if isinstance(answer, Accepted):
        return answer.body
    if isinstance(answer, Unavailable):
        raise ServiceAway(answer.reason)
    if isinstance(answer, Unauthorized):
        raise KeyRefused(answer.reason)
    raise NotFound(answer.reason) if answer.status == 404 else Rejected(answer.reason)

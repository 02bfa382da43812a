"""Requests of the reading client: each returns the response's document or raises an ApiError."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from urllib.parse import urlencode

from evalstop_client.errors import ApiError, ConfirmationNeeded, KeyRefused, NotFound, ServiceAway
from evalstop_client.service import Accepted, Answer, Json, Service, Unauthorized, Unavailable

PAGE = 100
TIMEOUT_SECONDS = 30.0

Query = Mapping[str, str | int | list[str] | None]
"""Query parameters by name; None and empty ones are omitted."""


class Connection:
    """A connection to one service with one key; not thread-safe."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._service = Service(url, key, TIMEOUT_SECONDS)
        weakref.finalize(self, self._service.close)

    def get(self, path: str, query: Query | None = None) -> Json:
        """GET a path such as `/runs`."""
        parameters = {name: value for name, value in (query or {}).items() if value not in (None, [])}
        return _read_document(self._service.get(f"{path}?{urlencode(parameters, doseq=True)}" if parameters else path))

    def post(self, path: str, body: Json | None = None) -> Json:
        """POST to a path, with a body if the route requires one."""
        return _require_success(_read_document(self._service.send("POST", path, body)))

    def patch(self, path: str, body: Json) -> Json:
        return _require_success(_read_document(self._service.send("PATCH", path, body)))

    def put(self, path: str, body: Json) -> Json:
        return _require_success(_read_document(self._service.send("PUT", path, body)))

    def delete(self, path: str) -> None:
        _read_document(self._service.send("DELETE", path))

    def pages(self, path: str, query: Query, page: int = PAGE) -> Iterator[Json]:
        """The items of a list, fetched page by page on demand."""
        while True:
            answer = self.get(path, {**query, "limit": page})
            yield from answer["items"]
            if answer["next_cursor"] is None:
                return
            query = {**query, "cursor": answer["next_cursor"]}

    def page_of(self, run_id: str) -> str:
        """The URL of a run's page, if the service does not return it."""
        return self._service.page_of(run_id)


def _require_success(document: Json) -> Json:
    """Return the document; raises ConfirmationNeeded if it is an open proposal, which another person must confirm."""
    if "proposed_by" in document and document["state"] == "open":
        raise ConfirmationNeeded(f"{document['summary']}: `evalstop proposals confirm {document['id']}`.")
    return document


def _read_document(answer: Answer) -> Json:
    if isinstance(answer, Accepted):
        return answer.body
    if isinstance(answer, Unavailable):
        raise ServiceAway(answer.reason)
    if isinstance(answer, Unauthorized):
        raise KeyRefused(answer.reason)
    raise NotFound(answer.reason) if answer.status == 404 else ApiError(answer.reason)

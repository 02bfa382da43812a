"""Reads JSON from a server of runs over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from evalstop_lab.errors import UnreadableInput

TRIES = 4
TIMEOUT_SECONDS = 30.0


class Remote:
    """A client of the server at `url`, closed at the end of the block.

    Transient errors are retried; other errors are raised with the server's message.
    """

    def __init__(self, url: str, headers: Mapping[str, str], auth: tuple[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url, headers=dict(headers), auth=auth, timeout=TIMEOUT_SECONDS, follow_redirects=False
        )

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """GET; parameters that are None are left out."""
        return self._request("GET", path, params={key: value for key, value in query.items() if value is not None})

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST, for servers whose search uses it."""
        return self._request("POST", path, json={key: value for key, value in body.items() if value is not None})

    def pages(self, ask: Callable[[str | None], dict[str, Any]], items: str, token: str) -> Iterator[dict[str, Any]]:
        """All items of a listing: `ask` gets the token of the next page, None for the first."""
        following: str | None = None
        while True:
            page = ask(following)
            listed = page.get(items) or []
            if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
                raise UnreadableInput(self.url, f"`{items}` is not a list of objects; check the kind of server")
            yield from listed
            before, following = following, page.get(token)
            if not following:
                return
            if following == before:
                raise UnreadableInput(self.url, f"the list of {items} does not end: a page was returned twice")

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                answer = self._client.request(method, path, **options)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                problem = f"it answered {answer.status_code}"
                continue
            return self._read(answer, path)
        raise UnreadableInput(self.url, f"{path}: {problem}, {TRIES} times; check the address and the server")

    def _read(self, answer: httpx.Response, path: str) -> dict[str, Any]:
        if not answer.is_success:
            problem = f"{path}: it answered {answer.status_code}: {answer.text[:200].strip()!r}"
            hint = "; give a key with read access" if answer.status_code in (401, 403) else ""
            raise UnreadableInput(self.url, problem + hint)
        try:
            document = answer.json()
        except ValueError as error:
            raise UnreadableInput(self.url, f"{path}: the answer is not JSON ({error})") from error
        if not isinstance(document, dict):
            raise UnreadableInput(self.url, f"{path}: the answer is not a JSON object")
        return document

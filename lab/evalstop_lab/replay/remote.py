"""JSON over HTTP from a server that keeps runs, read only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from evalstop_lab.errors import UnreadableInput

TRIES = 4
TIMEOUT_SECONDS = 30.0


class Remote:
    """A server at `url`, until the end of the block.

    What fails in passing is tried again; what it refuses is said with its own words.
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
        return self._ask("GET", path, params={key: value for key, value in query.items() if value is not None})

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST, for servers that search by it."""
        return self._ask("POST", path, json={key: value for key, value in body.items() if value is not None})

    def pages(self, ask: Callable[[str | None], dict[str, Any]], items: str, token: str) -> Iterator[dict[str, Any]]:
        """All items of a listing: `ask` gets the token of the next page, None for the first."""
        following: str | None = None
        while True:
            page = ask(following)
            found = page.get(items) or []
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise UnreadableInput(self.url, f"its `{items}` is no list of objects; is it the right kind of server")
            yield from found
            before, following = following, page.get(token)
            if not following:
                return
            if following == before:
                raise UnreadableInput(self.url, f"its list of {items} does not end: the same page comes again")

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        said = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                answer = self._client.request(method, path, **more)
            except httpx.HTTPError as error:
                said = str(error) or type(error).__name__
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                said = f"it answers {answer.status_code}"
                continue
            return self._read(answer, path)
        raise UnreadableInput(self.url, f"{path}: {said}, {TRIES} times; is it the right address, and is it up")

    def _read(self, answer: httpx.Response, path: str) -> dict[str, Any]:
        if not answer.is_success:
            words = f"{path}: it answers {answer.status_code}: {answer.text[:200].strip()!r}"
            hint = "; give a key that may read" if answer.status_code in (401, 403) else ""
            raise UnreadableInput(self.url, words + hint)
        try:
            found = answer.json()
        except ValueError as error:
            raise UnreadableInput(self.url, f"{path}: the answer is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise UnreadableInput(self.url, f"{path}: the answer is no JSON object")
        return found


def environment(*names: str) -> str | None:
    """The first of these variables that is set."""
    return next((value for name in names if (value := os.environ.get(name))), None)

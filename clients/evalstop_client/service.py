"""The service over HTTP: a request returns one of four answers, never raises, and says when to try again."""

from __future__ import annotations

import functools
import json
import os
import random
import ssl
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from evalstop_client.version import __version__

if TYPE_CHECKING:
    import httpx  # imported with the first request, in its thread, so that the trainer's start does not wait

_importing = threading.RLock()
"""Held while a thread imports. A fork waits for it: in the child, a module that was being imported would stay locked,
and whatever imports it there would wait forever."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
    )

Json = dict[str, Any]

BUSY_STATUSES = frozenset({408, 425, 429})
MOST_ERRORS = 3  # maximum number of a problem's errors in one log line


@dataclass(frozen=True)
class Accepted:
    """The service fulfilled the request and answered with `body`."""

    body: Json


@dataclass(frozen=True)
class Unavailable:
    """The service cannot be reached or cannot answer now: retry, after `retry_after_seconds` if given."""

    reason: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True)
class Unauthorized:
    """The service does not accept the key; a person must fix that."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The service will never accept this request; `pointers` locate the errors, and `code` is that of the problem."""

    status: int
    reason: str
    pointers: tuple[str, ...] = ()
    code: str = ""


Answer = Accepted | Unavailable | Unauthorized | Refused


class Service:
    """A connection to one EvalStop service, which threads may share."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float = 10.0) -> None:
        self._site = url.rstrip("/")
        self._root = self._site + "/api/v1"
        self._headers = {
            "user-agent": f"evalstop-client/{__version__}",
            "accept": "application/json",
            "content-type": "application/json",
        }
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout_seconds = timeout_seconds
        self._client: httpx.Client | None = None

    def post(self, path: str, body: Json) -> Answer:
        """POST `body` to a path such as `/runs`."""
        return self.send("POST", path, body)

    def get(self, path: str) -> Answer:
        """GET a path such as `/runs/{id}`."""
        return self.send("GET", path)

    def send(self, method: str, path: str, body: Json | None = None) -> Answer:
        """Send a request by any method; a response without a body becomes an empty object."""
        try:  # all ASCII: names may hold lone surrogates
            content = None if body is None else json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return Refused(0, f"{method} {path}: the body is not JSON: {error}")
        try:
            return understand(self._open_client().request(method, self._root + path, content=content))
        except Exception as error:  # also ImportError, ValueError: a proxy of the environment, a name of no host
            return Unavailable(f"{method} {self._root}{path}: {type(error).__name__}: {error}")

    def page_of(self, run_id: str) -> str:
        """The URL of a run's page, if the service does not return it."""
        return f"{self._site}/runs/{run_id}"

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _open_client(self) -> httpx.Client:
        with _importing:  # the first client imports further modules
            if self._client is None:
                import httpx

                self._client = httpx.Client(
                    headers=self._headers,
                    timeout=self._timeout_seconds,
                    verify=self._root.startswith("https:") and trusted_certificates(),
                    trust_env=not is_on_this_machine(self._site),
                )
            return self._client


def is_on_this_machine(url: str) -> bool:
    """Whether a url leads to this machine, which no proxy of the environment can reach.

    >>> is_on_this_machine("http://127.0.0.1:8787"), is_on_this_machine("http://evalstop:8787")
    (True, False)
    """
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@functools.cache
def trusted_certificates() -> ssl.SSLContext:
    """The trusted certificates, loaded once and on first use, because loading is slow."""
    import httpx

    try:
        return httpx.create_ssl_context()
    except OSError as error:  # it does not name its file
        named = [f"{name}={os.environ[name]}" for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
        raise OSError(f"the certificates of {' and '.join(named)} cannot be read: {error}") from error


def understand(response: httpx.Response) -> Answer:
    """Classify a response.

    Only a problem document of the service counts as a refusal: a 403, 404 or 200 of a proxy, as while the service is
    being replaced, means that it is unavailable.
    """
    status = response.status_code
    if status == 204:
        return Accepted({})
    body = object_in(response)
    reason = _describe_refusal(response, body)
    spoken = response.headers.get("content-type", "").startswith("application/problem+json")
    if 200 <= status < 300:
        if body is None:
            return Unavailable(f"{reason}: the answer is not EvalStop's; is the url right?")
        return Accepted(body)
    if status in (401, 403) and spoken:
        return Unauthorized(reason)
    if status in BUSY_STATUSES or status >= 500:
        return Unavailable(reason, _retry_after_seconds(response.headers.get("retry-after")))
    if status == 413 or (400 <= status < 500 and spoken):
        return Refused(status, reason, _read_pointers(body), str((body or {}).get("code", "")))
    return Unavailable(f"{reason}: the answer is not EvalStop's; is the url right?")


def object_in(response: httpx.Response) -> Json | None:
    """The JSON object in a response; None if it holds anything else."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _describe_refusal(response: httpx.Response, body: Json | None) -> str:
    errors = body.get("errors") if body else None
    fields = ("title",) if errors else ("title", "detail")  # the detail only counts the errors
    parts = [str(body[name]) for name in fields if body and body.get(name)]
    if isinstance(errors, list):
        described_errors = [
            error for error in errors if isinstance(error, dict) and {"pointer", "detail"} <= error.keys()
        ]
        parts += [f"{error['pointer']}: {error['detail']}" for error in described_errors[:MOST_ERRORS]]
        if len(described_errors) > MOST_ERRORS:
            parts.append(f"and {len(described_errors) - MOST_ERRORS} more")
    where = f"{response.request.method} {response.request.url} answered {response.status_code}"
    return f"{where}: {'; '.join(parts)}" if parts else where


def _read_pointers(body: Json | None) -> tuple[str, ...]:
    errors = body.get("errors") if body else None
    if not isinstance(errors, list):
        return ()
    return tuple(str(error["pointer"]) for error in errors if isinstance(error, dict) and "pointer" in error)


def _retry_after_seconds(header: str | None) -> float | None:
    """Seconds from a Retry-After header; None if it holds a date, as no answer of the service does."""
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        return None


FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
LONGEST_ASKED_SECONDS = 300.0


def wait_seconds(failures: int, chance: float, retry_after_seconds: float | None = None) -> float:
    """Seconds to wait after `failures` (>= 1) failed tries in a row: doubles, with `chance` in [0, 1) as jitter.

    Waits at least `retry_after_seconds` (Retry-After), up to five minutes.
    """
    doubled = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    jittered = doubled * (0.5 + chance / 2)
    if retry_after_seconds is None:
        return jittered
    return max(jittered, min(retry_after_seconds, LONGEST_ASKED_SECONDS))


REFUSED_SECONDS = 30.0
"""Pause between retries while the service does not know the endpoint or the key."""


def seconds_after(answer: Refused | Unauthorized | Unavailable, failures: int) -> float:
    """Seconds to wait after `failures` (>= 1) failed tries in a row and this last answer."""
    requested_seconds = answer.retry_after_seconds if isinstance(answer, Unavailable) else REFUSED_SECONDS
    return wait_seconds(failures, random.random(), requested_seconds)

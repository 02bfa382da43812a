"""Sends one signed event by HTTP or by mail and returns the answer; never raises for an error of the endpoint.

It connects to addresses that the address policy allows, and to no others (protection against SSRF).

The connections are httpcore2's, which httpx2 uses too. A delivery must not use the additions of httpx2, such as
cookies, redirects, proxies of the environment and decompression (of possible decompression bombs). A request
takes some 1 ms of processor time, five times that of aiohttp: stops are few, and one client is enough.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import httpcore2
import httpx2

from evalstop_service.security.address_policy import AddressPolicy, AddressRefused
from evalstop_service.webhooks.channels import is_mail_url
from evalstop_service.webhooks.delivery.mail import EmailSettings, Mailer
from evalstop_service.webhooks.retry import Answer

BODY_LIMIT_BYTES = 1024
"""Most bytes read of an answer's body, to show them to the operator."""

ERROR_SIGNS = 300
"""Most characters of the body in an error."""

BODY_SECONDS = 1.0
"""How long to wait for an answer's body once its status is known."""

KEPT_SECONDS = 15.0
"""How long an idle connection stays open."""

HEADERS = {"User-Agent": "EvalStop", "Accept": "*/*", "Accept-Encoding": "identity", "Content-Type": "application/json"}

_FAILURES = (
    httpx2.InvalidURL,
    httpcore2.UnsupportedProtocol,
    httpcore2.ProtocolError,
    httpcore2.NetworkError,
    OSError,
    ValueError,
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Looks up the addresses of a host."""


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Looks a host up, checks each address, and connects to an allowed one.

    It connects to the checked address, so a name that resolves to another address a moment later (DNS rebinding) gains
    nothing. TLS still verifies the host's name, which `Host` and SNI carry.
    """

    def __init__(self, address_policy: AddressPolicy, resolve: Resolve | None) -> None:
        self._address_policy = address_policy
        self._resolve = resolve or _look_up
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore passes it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Try the allowed addresses in turn, each for its share of the time; without any, raise AddressRefused."""
        try:
            async with asyncio.timeout(timeout):
                addresses = dict.fromkeys(await self._resolve(host, port))
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        except OSError as error:
            raise httpcore2.ConnectError(error) from error
        objections = {address: self._address_policy.find_objection(address) for address in addresses}
        allowed = [address for address, objection in objections.items() if objection is None]
        if not allowed:
            raise AddressRefused("; ".join(filter(None, objections.values())))
        seconds = None if timeout is None else timeout / len(allowed)
        for address in allowed[:-1]:
            try:
                return await self._backend.connect_tcp(address, port, seconds, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._backend.connect_tcp(allowed[-1], port, seconds, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Wait before another try."""
        await asyncio.sleep(seconds)


async def _look_up(host: str, port: int) -> list[str]:
    """The addresses of a host by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _explain_failure(failure: httpcore2.ConnectError) -> str:
    """Why there is no connection, in the system's words."""
    cause: object = next(iter(failure.args), None)  # the pool has cut off `__cause__`
    while isinstance(cause, BaseException):
        if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's
            return cause.strerror or str(cause)
        if isinstance(cause, OSError) and cause.errno is not None:  # that of a failed lookup is negative
            return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or str(cause)
        cause = cause.__cause__
    return str(failure)


class Sender:
    """A pool of connections: `async with Sender(...) as sender`.

    `timeout_seconds`: for the whole attempt, from connecting to the last byte read, however slowly the bytes arrive.
    `connect_seconds`: for the connection, and again for TLS. `address_policy`: where events may go; None allows only
    public addresses. `resolve`: looks up names; None uses the system's. `mail`: the SMTP server; None sends no mail.
    """

    def __init__(
        self,
        timeout_seconds: float = 15.0,
        connect_seconds: float = 5.0,
        *,
        address_policy: AddressPolicy | None = None,
        resolve: Resolve | None = None,
        mail: EmailSettings | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.connect_seconds = connect_seconds
        self._network = CheckedNetwork(address_policy or AddressPolicy(), resolve)
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._mailer = Mailer(mail or EmailSettings(), timeout_seconds)

    async def __aenter__(self) -> Self:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),  # reads SSL_CERT_FILE
            max_connections=None,  # the worker limits concurrent attempts
            keepalive_expiry=KEPT_SECONDS,
            network_backend=self._network,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            await self._pool.aclose()
        self._mailer.close()

    async def send(self, url: str, headers: dict[str, str], body: bytes, event: str = "{}") -> Answer:
        """POST the body, or send it by mail. Redirects are not followed.

        `event`: the event in the standard format, which names the owner of the run.
        """
        if is_mail_url(url):
            return await self._mailer.send(url, headers, body.decode(), event)
        started = time.perf_counter()
        answer: Answer | None = None
        error = ""
        try:
            answer = await self._post(httpx2.URL(url), headers, body)
        except httpcore2.ConnectTimeout:
            error = f"no connection within {self.connect_seconds:g} s"
        except TimeoutError:
            error = f"no answer within {self.timeout_seconds:g} s"
        except AddressRefused as refusal:
            error = _to_printable(f"not sent: {refusal}")
        except httpcore2.ConnectError as failure:
            host = httpx2.URL(url).netloc.decode()
            error = _to_printable(f"cannot connect to {host}: {_explain_failure(failure)}")
        except _FAILURES as failure:
            error = _to_printable(f"{type(failure).__name__}: {failure}")
        duration_ms = (time.perf_counter() - started) * 1000
        return replace(answer, duration_ms=duration_ms) if answer else Answer(None, error, duration_ms)

    async def _post(self, url: httpx2.URL, headers: dict[str, str], body: bytes) -> Answer:
        assert self._pool is not None, "the sender is used as a context manager"
        if not url.host or (url.port or 0) > 65535:
            raise httpx2.InvalidURL("the URL has no host, or a port above 65535")
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds
        async with (
            asyncio.timeout_at(deadline) as limit,
            self._pool.stream(
                "POST",
                httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=list(({"Host": url.netloc.decode()} | HEADERS | headers).items()),
                content=body,
                extensions={"timeout": {"connect": self.connect_seconds}},
            ) as response,
        ):
            limit.reschedule(None)  # the status has arrived; no time limit must lose it
            text = await _read_excerpt(response, deadline)
            if 200 <= response.status < 300 and (text or "").lower().startswith(("<!doctype html", "<html")):
                error = f"HTTP {response.status}, but a web page: a proxy asks for a sign-in, or the URL is a site's"
                return Answer(response.status, error, 0.0, text)
            if 200 <= response.status < 300:
                return Answer(response.status, None, 0.0, text)
            error = f"HTTP {response.status}: {text[:ERROR_SIGNS]}" if text else f"HTTP {response.status}"
            return Answer(response.status, error, 0.0, text)


async def _read_excerpt(response: httpcore2.Response, deadline: float) -> str | None:
    """The start of the body; None if it is empty. A short one is read to its end, so that its connection can be reused.

    A body that is long, slow or broken does not invalidate the status that preceded it.
    """
    read = bytearray()
    try:
        async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + BODY_SECONDS)):
            async for chunk in response.aiter_stream():
                read += chunk[: BODY_LIMIT_BYTES - len(read)]
                if len(read) >= BODY_LIMIT_BYTES:
                    break
    except (TimeoutError, httpcore2.ProtocolError, httpcore2.NetworkError):
        pass
    return _to_printable(read.decode(errors="replace"), BODY_LIMIT_BYTES) if read else None


def _to_printable(text: str, most: int = ERROR_SIGNS) -> str:
    """One short line of printable text, which any database can store."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:most]

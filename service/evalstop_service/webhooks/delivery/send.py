"""Sends one signed event over HTTP, or as mail, and returns the answer; never raises for what an endpoint does.

The address policy is checked in aiohttp's socket factory, for the address that the socket connects to: a name that
resolves to another address afterwards changes nothing. The service has httpx as well, for OpenID Connect, which Authlib
binds to it; here a request through httpx would take 5 to 10 times the CPU.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver

from evalstop_service.security.address_policy import AddressPolicy, AddressRefused
from evalstop_service.webhooks.delivery.mail import Mailer, MailSettings
from evalstop_service.webhooks.email_addresses import is_mail_url
from evalstop_service.webhooks.retry import Answer

BODY_LIMIT_BYTES = 1024
"""As much of an answer's body is read, to be shown to the operator."""

ERROR_SIGNS = 300
"""As much of it goes into an error."""

BODY_SECONDS = 1.0
"""As long is waited for an answer's body once its status is known."""


class Sender:
    """One HTTP session: `async with Sender(...) as sender`.

    `timeout_seconds`: for the whole of an attempt, from connecting to the last byte read, however slowly it drips.
    `connect_seconds`: for the connection alone, TLS included. `address_policy`: where events may go; None allows
    public addresses alone. `resolver`: finds the addresses of a name; None asks the system. `mail`: the SMTP server;
    None: there is none.
    """

    def __init__(
        self,
        timeout_seconds: float = 15.0,
        connect_seconds: float = 5.0,
        *,
        address_policy: AddressPolicy | None = None,
        resolver: AbstractResolver | None = None,
        mail: MailSettings | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.connect_seconds = connect_seconds
        self._address_policy = address_policy or AddressPolicy()
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None
        self._mailer = Mailer(mail, timeout_seconds)

    async def __aenter__(self) -> Self:
        # No proxies or .netrc from the environment, no cookies, no unpacking of what may be a bomb.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the worker bounds how many are under way
                resolver=self._resolver,
                socket_factory=self._socket,
            ),
            # No rounding up to whole seconds: an attempt that outlasts its time may outlast its lease.
            timeout=aiohttp.ClientTimeout(
                total=self.timeout_seconds, connect=self.connect_seconds, ceil_threshold=math.inf
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            headers={"User-Agent": "EvalStop", "Content-Type": "application/json", "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
        self._mailer.close()

    async def send(self, url: str, headers: dict[str, str], body: bytes, event: str = "{}") -> Answer:
        """POST the body, or send it by mail. A redirect is an answer like any other.

        `event`: what the body was made of, which names the owner of its run.
        """
        if is_mail_url(url):
            return await self._mailer.send(url, headers, body.decode(), event)
        assert self._session is not None, "the sender is used as a context manager"
        begun = time.perf_counter()
        code: int | None = None
        error: str | None = None
        retry_after: str | None = None
        text: str | None = None
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                code = response.status
                if not response.content.at_eof():
                    text = await _excerpt(response)  # to its end if that is near, so that the connection serves again
                if not 200 <= code < 300:
                    retry_after = response.headers.get("Retry-After")
                    error = f"HTTP {code}: {text[:ERROR_SIGNS]}" if text else f"HTTP {code}"
        except aiohttp.ConnectionTimeoutError:
            error = f"no connection within {self.connect_seconds:g} s"
        except TimeoutError:
            error = f"no answer within {self.timeout_seconds:g} s"
        except aiohttp.ClientConnectorError as failure:
            refused = isinstance(failure.os_error, AddressRefused)
            error = _printable(f"not sent: {failure.os_error}" if refused else f"{type(failure).__name__}: {failure}")
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error = _printable(f"{type(failure).__name__}: {failure}")
        return Answer(code, error, retry_after, (time.perf_counter() - begun) * 1000, text)

    def _socket(self, target: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        """A socket for one address, or AddressRefused; of several addresses of a name the next is tried then."""
        family, kind, protocol, _, address = target
        objection = self._address_policy.find_objection(str(address[0]))
        if objection is not None:
            raise AddressRefused(objection)
        return socket.socket(family, kind, protocol)


async def _excerpt(response: aiohttp.ClientResponse) -> str:
    """The start of the body. A body that is long, slow or broken takes nothing from the status that came before it."""
    read = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while len(read) < BODY_LIMIT_BYTES:
                chunk = await response.content.read(BODY_LIMIT_BYTES - len(read))
                if not chunk:
                    return _printable(
                        read.decode(errors="replace"), BODY_LIMIT_BYTES
                    )  # all of it: the connection can serve again
                read += chunk
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        pass
    response.close()  # the rest is not waited for
    return _printable(read.decode(errors="replace"), BODY_LIMIT_BYTES)


def _printable(text: str, most: int = ERROR_SIGNS) -> str:
    """One short line that any database can hold."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:most]

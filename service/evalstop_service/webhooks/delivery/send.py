"""Sends one signed event by HTTP or by mail and returns the answer; never raises for an error of the endpoint.

aiohttp's socket factory checks the address policy for the address that the socket connects to, which prevents DNS
rebinding. The service also has httpx, which Authlib requires for OpenID Connect; here a request through httpx would
take 5 to 10 times the CPU.
"""

from __future__ import annotations

import asyncio
import math
import os
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
"""Most bytes read of an answer's body, to show them to the operator."""

ERROR_SIGNS = 300
"""Most characters of the body in an error."""

BODY_SECONDS = 1.0
"""How long to wait for an answer's body once its status is known."""


class Sender:
    """One HTTP session: `async with Sender(...) as sender`.

    `timeout_seconds`: for the whole attempt, from connecting to the last byte read, however slowly the bytes arrive.
    `connect_seconds`: for the connection, including TLS. `address_policy`: where events may go; None allows only
    public addresses. `resolver`: resolves names; None uses the system's. `mail`: the SMTP server; None sends no mail.
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
        # No proxies or .netrc from the environment, no cookies, no decompression (of what may be a decompression bomb).
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the worker limits concurrent attempts
                resolver=self._resolver,
                socket_factory=self._socket,
            ),
            # No rounding up to whole seconds: an attempt that exceeds its timeout may outlast its lease.
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
        """POST the body, or send it by mail. Redirects are not followed.

        `event`: the event in the standard format, which names the owner of the run.
        """
        if is_mail_url(url):
            return await self._mailer.send(url, headers, body.decode(), event)
        assert self._session is not None, "the sender is used as a context manager"
        started = time.perf_counter()
        code: int | None = None
        error: str | None = None
        retry_after: str | None = None
        text: str | None = None
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                code = response.status
                if not response.content.at_eof():
                    text = await _read_excerpt(response)  # a short one to its end: the connection can be reused
                if not 200 <= code < 300:
                    retry_after = response.headers.get("Retry-After")
                    error = f"HTTP {code}: {text[:ERROR_SIGNS]}" if text else f"HTTP {code}"
        except aiohttp.ConnectionTimeoutError:
            error = f"no connection within {self.connect_seconds:g} s"
        except TimeoutError:
            error = f"no answer within {self.timeout_seconds:g} s"
        except aiohttp.ClientConnectorError as failure:
            error = _to_printable(_describe_failure(failure))
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error = _to_printable(f"{type(failure).__name__}: {failure}")
        return Answer(code, error, retry_after, (time.perf_counter() - started) * 1000, text)

    def _socket(self, target: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        """Create a socket for one address, or raise AddressRefused: then aiohttp tries the name's next address."""
        family, kind, protocol, _, address = target
        objection = self._address_policy.find_objection(str(address[0]))
        if objection is not None:
            raise AddressRefused(objection)
        return socket.socket(family, kind, protocol)


def _describe_failure(failure: aiohttp.ClientConnectorError) -> str:
    """Why there is no connection, without aiohttp's terms."""
    cause = failure.os_error
    if isinstance(cause, AddressRefused):
        return f"not sent: {cause}"
    # The errno of an SSLError is OpenSSL's, that of a failed lookup is negative.
    errno = 0 if isinstance(failure, aiohttp.ClientSSLError) else cause.errno or 0
    reason = os.strerror(errno) if errno > 0 else cause.strerror or str(cause)
    return f"cannot connect to {failure.host}:{failure.port}: {reason}"


async def _read_excerpt(response: aiohttp.ClientResponse) -> str:
    """The start of the body. A body that is long, slow or broken does not invalidate the status that preceded it."""
    read = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while len(read) < BODY_LIMIT_BYTES:
                chunk = await response.content.read(BODY_LIMIT_BYTES - len(read))
                if not chunk:
                    return _to_printable(
                        read.decode(errors="replace"), BODY_LIMIT_BYTES
                    )  # read to its end: the connection can be reused
                read += chunk
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        pass
    response.close()  # do not wait for the rest
    return _to_printable(read.decode(errors="replace"), BODY_LIMIT_BYTES)


def _to_printable(text: str, most: int = ERROR_SIGNS) -> str:
    """One short line of printable text, which any database can store."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:most]

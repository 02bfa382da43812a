"""Connects the sender to addresses that the address policy allows, and to no others (protection against SSRF)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpcore2

from evalstop_service.security.address_policy import AddressPolicy, AddressRefused

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Looks up the addresses of a host."""


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Looks a host up, checks each address, and connects to an allowed one.

    The address that was checked is the one connected to, so a name that resolves to another address a moment later (DNS
    rebinding) gains nothing. TLS still verifies the host's name, which `Host` and SNI carry.
    """

    def __init__(self, address_policy: AddressPolicy, resolve: Resolve | None) -> None:
        self._address_policy = address_policy
        self._resolve = resolve or look_up
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


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def explain_failure(failure: httpcore2.ConnectError) -> str:
    """Why there is no connection, in the system's words."""
    cause: object = next(iter(failure.args), None)  # the pool has cut off `__cause__`
    while isinstance(cause, BaseException):
        if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's
            return cause.strerror or str(cause)
        if isinstance(cause, OSError) and cause.errno is not None:  # that of a failed lookup is negative
            return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or str(cause)
        cause = cause.__cause__
    return str(failure)

"""Endpoints that try to have the service call what is inside: the address of each connection is what counts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from evalstop_service.security.address_policy import AddressPolicy, parse_address_policy
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.retry import Answer

from tests.fixtures.certificates import create_self_signed_certificate
from tests.service.webhooks.delivery.fakes import LOOPBACK, FakeEndpoint, Reply, utc_now


class FakeResolver(AbstractResolver):
    """Answers each question with the next of the lists of addresses that it was given, and the last ever after."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        kind = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            ResolveResult(hostname=host, host=one, port=port, family=kind[":" in one], proto=0, flags=0)
            for one in addresses
        ]

    async def close(self) -> None:
        """Nothing is held."""


def send(*urls: str, address_policy: AddressPolicy | None = None, resolver: FakeResolver | None = None) -> list[Answer]:
    """Send to each URL over one session."""

    async def run() -> list[Answer]:
        async with Sender(20.0, 20.0, address_policy=address_policy, resolver=resolver) as sender:
            return [await sender.send(url, {}, b"{}") for url in urls]

    return asyncio.run(run())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"])
def test_nothing_is_sent_inside(host: str) -> None:
    """However an inner address is written, nothing is sent there unless the operator says so."""
    with FakeEndpoint(Reply()) as endpoint:
        (answer,) = send(endpoint.url.replace("127.0.0.1", host))
    assert answer.status_code is None
    assert answer.error
    assert endpoint.received == []


@pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"])
def test_nothing_is_sent_inside_by_ipv6(host: str) -> None:
    """An inner address within one of IPv6 is refused before a connection is tried."""
    with FakeEndpoint(Reply()) as endpoint:
        (answer,) = send(endpoint.url.replace("127.0.0.1", host))
    assert answer.error is not None
    assert answer.error.startswith("not sent: ")
    assert endpoint.received == []


def test_a_name_that_changes_its_mind_gains_nothing() -> None:
    """A name that is public when its endpoint is made, and inner when it is called, is refused at the call."""
    with FakeEndpoint(Reply()) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "rebinding.example")
        assert AddressPolicy().find_url_objection(url, lambda _: ["93.184.216.34"]) is None
        (answer,) = send(url, resolver=FakeResolver(["127.0.0.1"]))
    assert answer.error is not None
    assert answer.error.startswith("not sent: 127.0.0.1 is not a public address")
    assert endpoint.received == []


def test_the_address_that_is_allowed_is_called() -> None:
    """Of several addresses of a name those that are refused are passed over."""
    with FakeEndpoint(Reply()) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "both.example")
        resolver = FakeResolver(["10.0.0.1", "fd12::1", "127.0.0.1"])
        (answer,) = send(url, address_policy=parse_address_policy("127.0.0.1/32"), resolver=resolver)
    assert (answer.status_code, answer.error) == (200, None)
    assert endpoint.received[0].headers["host"].startswith("both.example:")


def test_all_refused_says_so() -> None:
    """When every address of a name is refused, the answer names them."""
    (answer,) = send("http://both.example/", resolver=FakeResolver(["10.0.0.1", "::1"]))
    assert answer.error is not None
    assert "10.0.0.1 is not a public address" in answer.error
    assert "::1 is not a public address" in answer.error


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_leads_nowhere(status: int) -> None:
    """An endpoint that is allowed cannot send us on to one that is not."""
    with FakeEndpoint(Reply()) as inner:
        to = {"Location": inner.url.replace("127.0.0.1", "127.0.0.2")}
        with FakeEndpoint(Reply(status, to)) as endpoint:
            (answer,) = send(endpoint.url, address_policy=parse_address_policy("127.0.0.1/32"))
    assert answer.status_code == status
    assert inner.received == []


def test_a_stranger_s_certificate_is_refused(tmp_path: Path) -> None:
    """TLS is verified against the name: nothing is sent to a server that cannot prove it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(create_self_signed_certificate(tmp_path, utc_now()))
    with FakeEndpoint(Reply()) as endpoint:
        endpoint.speak_tls(context)
        (answer,) = send(endpoint.url.replace("http:", "https:"), address_policy=LOOPBACK)
    assert answer.status_code is None
    assert answer.error is not None
    assert "certificate" in answer.error.lower()
    assert endpoint.received == []

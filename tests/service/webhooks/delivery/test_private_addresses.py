"""Endpoints whose addresses lead into the private network: each connection's address is checked."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.security.address_policy import AddressPolicy, parse_address_policy
from evalstop_service.webhooks.delivery.send import Resolve, Sender
from evalstop_service.webhooks.retry import Answer

from tests.fixtures.certificates import create_self_signed_certificate
from tests.service.webhooks.delivery.fakes import LOOPBACK, FakeEndpoint, Reply


def resolve_to(*addresses: str) -> Resolve:
    """A resolver that knows every name by these addresses."""

    async def resolve(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return resolve


def send(*urls: str, address_policy: AddressPolicy | None = None, resolve: Resolve | None = None) -> list[Answer]:
    """Send to each URL over one session."""

    async def run() -> list[Answer]:
        async with Sender(20.0, 20.0, address_policy=address_policy, resolve=resolve) as sender:
            return [await sender.send(url, {}, b"{}") for url in urls]

    return asyncio.run(run())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"])
def test_private_ipv4_address_is_refused(host: str) -> None:
    """However a private address is written, nothing is sent to it unless the operator allows it."""
    with FakeEndpoint(Reply()) as endpoint:
        (answer,) = send(endpoint.url.replace("127.0.0.1", host))
    assert answer.status_code is None
    assert answer.error
    assert endpoint.received == []


@pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"])
def test_private_address_in_ipv6_is_refused(host: str) -> None:
    """A private address, also embedded in an IPv6 address, is refused before connecting."""
    with FakeEndpoint(Reply()) as endpoint:
        (answer,) = send(endpoint.url.replace("127.0.0.1", host))
    assert answer.error is not None
    assert answer.error.startswith("not sent: ")
    assert endpoint.received == []


def test_rebound_host_name_is_refused() -> None:
    """A host name that resolves to a private address at delivery is refused, whatever it resolved to before (DNS
    rebinding)."""
    with FakeEndpoint(Reply()) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "rebinding.example")
        assert AddressPolicy().find_url_objection(url) is None
        (answer,) = send(url, resolve=resolve_to("127.0.0.1"))
    assert answer.error is not None
    assert answer.error.startswith("not sent: 127.0.0.1 is not a public address")
    assert endpoint.received == []


def test_refused_addresses_of_a_name_are_skipped() -> None:
    """Of a host name's addresses, the allowed one is used."""
    with FakeEndpoint(Reply()) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "both.example")
        resolve = resolve_to("10.0.0.1", "fd12::1", "127.0.0.1")
        (answer,) = send(url, address_policy=parse_address_policy("127.0.0.1/32"), resolve=resolve)
    assert (answer.status_code, answer.error) == (200, None)
    assert endpoint.received[0].headers["host"].startswith("both.example:")


def test_error_names_all_refused_addresses() -> None:
    """When every address of a host name is refused, the error lists them."""
    (answer,) = send("http://both.example/", resolve=resolve_to("10.0.0.1", "::1"))
    assert answer.error is not None
    assert "10.0.0.1 is not a public address" in answer.error
    assert "::1 is not a public address" in answer.error


def test_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    """TLS certificates are verified against the host name: nothing is sent to a server that fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(create_self_signed_certificate(tmp_path, utc_now()))
    with FakeEndpoint(Reply()) as endpoint:
        endpoint.speak_tls(context)
        (answer,) = send(endpoint.url.replace("http:", "https:"), address_policy=LOOPBACK)
    assert answer.status_code is None
    assert answer.error is not None
    assert "certificate" in answer.error.lower()
    assert endpoint.received == []


@pytest.mark.parametrize(("host", "trusted"), [("localhost", True), ("other.example", False)])
def test_certificate_is_of_the_name_and_not_of_the_address(
    host: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trusted certificate counts for the name in the URL, whichever address the name has."""
    file = create_self_signed_certificate(tmp_path, utc_now())
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with FakeEndpoint(Reply()) as endpoint:
        endpoint.speak_tls(context)
        url = endpoint.url.replace("http:", "https:").replace("127.0.0.1", host)
        (answer,) = send(url, address_policy=LOOPBACK, resolve=resolve_to("127.0.0.1"))
    assert (answer.status_code == 200) == trusted
    assert [request.headers["host"] for request in endpoint.received] == ([urlsplit(url).netloc] if trusted else [])
    assert trusted or "certificate" in str(answer.error)


def test_next_address_is_tried_where_nothing_listens() -> None:
    """An address that refuses the connection does not keep the event from the name's next address."""
    with FakeEndpoint(Reply()) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "two.example")
        (answer,) = send(url, address_policy=LOOPBACK, resolve=resolve_to("127.0.0.2", "127.0.0.1"))
    assert answer.status_code == 200

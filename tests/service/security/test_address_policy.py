"""Where webhooks may go: public addresses, and no others unless an operator names their network."""

from __future__ import annotations

import ipaddress

import pytest
from evalstop_service.security.address_policy import METADATA, AddressPolicy, parse_address_policy
from hypothesis import given
from hypothesis import strategies as st

PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e", "64:ff9b::808:808"]

INNER = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "0.1.2.3"),
    *("169.254.169.254", "169.254.170.2", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "192.88.99.1", "192.0.0.170"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "100::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::", "3fff::1"),
]

INNER_NETWORKS = [
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "0.0.0.0/8"),
    *("224.0.0.0/4", "240.0.0.0/4"),
]
"""Of IPv4; IPv6 is held to what carries one of these, and to what is no global unicast."""


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    """Nothing has to be set for what is on the internet."""
    assert AddressPolicy().find_objection(address) is None


@pytest.mark.parametrize("address", INNER)
def test_inner_addresses_are_refused(address: str) -> None:
    """Everything else is refused, in whatever notation, with the setting that would allow it."""
    objection = AddressPolicy().find_objection(address)
    assert objection is not None
    assert "EVALSTOP_WEBHOOK_NETWORKS=" in objection


@given(network=st.sampled_from(INNER_NETWORKS), data=st.data())
def test_no_notation_leads_inside(network: str, data: st.DataObject) -> None:
    """Of an inner IPv4 network no address is allowed, plain or within an address of IPv6."""
    inner = data.draw(st.ip_addresses(network=network))
    low = int(inner)
    carriers = [
        inner,
        ipaddress.IPv6Address((0xFFFF << 32) | low),
        ipaddress.IPv6Address(low),
        ipaddress.IPv6Address(int(ipaddress.ip_address("64:ff9b::")) | low),
        ipaddress.IPv6Address((0x2002 << 112) | (low << 80) | 1),
        ipaddress.IPv6Address((0x20010000 << 96) | (low << 64)),
        ipaddress.IPv6Address((0x20010000 << 96) | (0x08080808 << 64) | (low ^ 0xFFFFFFFF)),
    ]
    for carrier in carriers:
        assert AddressPolicy().find_objection(str(carrier)) is not None, carrier


@given(st.ip_addresses(v=6))
def test_ipv6_is_global_unicast_or_refused(address: ipaddress.IPv6Address) -> None:
    """Of IPv6 only 2000::/3 is ever allowed by default, and public IPv4 in another notation."""
    carries = address.ipv4_mapped is not None or address in ipaddress.ip_network("64:ff9b::/96")
    if AddressPolicy().find_objection(str(address)) is None:
        assert address in ipaddress.ip_network("2000::/3") or carries


@given(st.ip_addresses(v=4))
def test_ipv4_agrees_with_the_registry(address: ipaddress.IPv4Address) -> None:
    """Nothing that the registry of special addresses does not call global is allowed."""
    if AddressPolicy().find_objection(str(address)) is None:
        assert address.is_global
        assert not address.is_multicast


@pytest.mark.parametrize(
    ("networks", "address"),
    [
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.0/8", "::ffff:127.0.0.1"),
        ("10.20.0.0/16, ::1/128", "::1"),
        ("10.20.0.0/16", "10.20.30.40"),
        ("any", "192.168.0.1"),
        ("any", "fd12::1"),
        ("169.254.169.254", "169.254.169.254"),
        ("169.254.0.0/16", "169.254.1.1"),
        ("fd00:ec2::254/128", "fd00:ec2::254"),
        ("10.0.0.0/8", "8.8.8.8"),
    ],
)
def test_what_an_operator_allows(networks: str, address: str) -> None:
    """Networks that are named are allowed, besides public addresses."""
    assert parse_address_policy(networks).find_objection(address) is None


@pytest.mark.parametrize("networks", ["any", "0.0.0.0/0,::/0", "100.64.0.0/10,fc00::/7,168.0.0.0/5,160.0.0.0/3"])
def test_credentials_are_not_reached_by_accident(networks: str) -> None:
    """Where clouds keep credentials is reached by its own name alone, however wide a network is allowed."""
    for network in METADATA:
        assert parse_address_policy(networks).find_objection(str(network[0])) is not None
    assert parse_address_policy(networks).find_objection("::ffff:169.254.169.254") is not None
    assert parse_address_policy(networks).find_objection("64:ff9b::a9fe:a9fe") is not None


def test_what_is_carried_must_be_allowed_too() -> None:
    """An address that carries another one is allowed when both are."""
    assert parse_address_policy("2002::/16").find_objection("2002:a00:1::1") is not None
    assert parse_address_policy("2002::/16, 10.0.0.0/8").find_objection("2002:a00:1::1") is None


@pytest.mark.parametrize("networks", ["10.0.0.1/8", "localhost", "10.0.0.0/8;::1", "everything"])
def test_what_is_no_network_is_refused(networks: str) -> None:
    """A setting that cannot be read says how networks are written."""
    with pytest.raises(ValueError, match="write networks as"):
        parse_address_policy(networks)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost"]
)
def test_a_url_that_leads_inside_is_refused(host: str) -> None:
    """Whichever way an address is written, or a name for it, the URL is refused when the endpoint is made."""
    objection = AddressPolicy().find_url_objection(f"https://{host}:8788/hook")
    assert objection is not None
    assert "not a public address" in objection


def test_a_url_is_taken_when_one_address_will_do() -> None:
    """A name is refused when none of its addresses is allowed; one without any may get some yet."""
    url = "https://receiver.example/"
    assert AddressPolicy().find_url_objection(url, lambda _: ["10.0.0.1", "8.8.8.8"]) is None
    assert AddressPolicy().find_url_objection(url, lambda _: []) is None
    objection = AddressPolicy().find_url_objection(url, lambda _: ["10.0.0.1", "fd12::1"])
    assert objection is not None
    assert objection.startswith("receiver.example is ")

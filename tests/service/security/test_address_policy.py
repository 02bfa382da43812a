"""Which addresses webhooks may be sent to: public ones, and networks that an operator allows."""

from __future__ import annotations

import ipaddress

import pytest
from evalstop_service.security.address_policy import METADATA, AddressPolicy, parse_address_policy
from hypothesis import given
from hypothesis import strategies as st

PUBLIC_ADDRESSES = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e", "64:ff9b::808:808"]

INTERNAL_ADDRESSES = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "0.1.2.3"),
    *("169.254.169.254", "169.254.170.2", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "192.88.99.1", "192.0.0.170"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "100::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::", "3fff::1"),
]

INTERNAL_NETWORKS = [
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "0.0.0.0/8"),
    *("224.0.0.0/4", "240.0.0.0/4"),
]
"""IPv4 networks; IPv6 addresses are refused if they embed one of these or are not global unicast."""


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_public_addresses_are_allowed(address: str) -> None:
    """They need no setting."""
    assert AddressPolicy().find_objection(address) is None


@pytest.mark.parametrize("address", INTERNAL_ADDRESSES)
def test_internal_addresses_are_refused(address: str) -> None:
    """The objection names the setting that would allow the address, in whatever notation it was given."""
    objection = AddressPolicy().find_objection(address)
    assert objection is not None
    assert "EVALSTOP_WEBHOOK_NETWORKS=" in objection


@given(network=st.sampled_from(INTERNAL_NETWORKS), data=st.data())
def test_ipv6_notations_of_internal_ipv4_are_refused(network: str, data: st.DataObject) -> None:
    """No address of an internal network is allowed, plain or embedded in IPv6."""
    internal = data.draw(st.ip_addresses(network=network))
    number = int(internal)
    notations = [
        internal,
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address(number),
        ipaddress.IPv6Address(int(ipaddress.ip_address("64:ff9b::")) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80) | 1),
        ipaddress.IPv6Address((0x20010000 << 96) | (number << 64)),
        ipaddress.IPv6Address((0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF)),
    ]
    for notation in notations:
        assert AddressPolicy().find_objection(str(notation)) is not None, notation


@given(st.ip_addresses(v=6))
def test_only_global_unicast_ipv6_is_allowed(address: ipaddress.IPv6Address) -> None:
    """The default policy allows IPv6 in 2000::/3 and public IPv4 embedded in IPv6, and nothing else."""
    embeds_ipv4 = address.ipv4_mapped is not None or address in ipaddress.ip_network("64:ff9b::/96")
    if AddressPolicy().find_objection(str(address)) is None:
        assert address in ipaddress.ip_network("2000::/3") or embeds_ipv4


@given(st.ip_addresses(v=4))
def test_allowed_ipv4_is_global_by_the_registry(address: ipaddress.IPv4Address) -> None:
    """No address that the IANA registry does not call global is allowed."""
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
def test_configured_networks_are_allowed(networks: str, address: str) -> None:
    """They are allowed in addition to public addresses."""
    assert parse_address_policy(networks).find_objection(address) is None


@pytest.mark.parametrize("networks", ["any", "0.0.0.0/0,::/0", "100.64.0.0/10,fc00::/7,168.0.0.0/5,160.0.0.0/3"])
def test_metadata_services_need_their_own_address(networks: str) -> None:
    """Cloud metadata addresses are refused in however wide a network, unless they are named themselves."""
    for network in METADATA:
        assert parse_address_policy(networks).find_objection(str(network[0])) is not None
    assert parse_address_policy(networks).find_objection("::ffff:169.254.169.254") is not None
    assert parse_address_policy(networks).find_objection("64:ff9b::a9fe:a9fe") is not None


def test_one_metadata_service_allows_no_other() -> None:
    """A network that names one of them does not name the others within the same range."""
    assert parse_address_policy("169.254.170.2").find_objection("169.254.169.254") is not None


def test_embedded_address_must_be_allowed_too() -> None:
    """An IPv6 address that embeds an IPv4 address is allowed if both are."""
    assert parse_address_policy("2002::/16").find_objection("2002:a00:1::1") is not None
    assert parse_address_policy("2002::/16, 10.0.0.0/8").find_objection("2002:a00:1::1") is None


@pytest.mark.parametrize("networks", ["10.0.0.1/8", "localhost", "10.0.0.0/8;::1", "everything"])
def test_invalid_network_setting_is_refused(networks: str) -> None:
    """The error shows how networks are written."""
    with pytest.raises(ValueError, match="write networks as"):
        parse_address_policy(networks)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost"]
)
def test_url_of_an_internal_host_is_refused(host: str) -> None:
    """The host is refused in every notation of its address, and by name."""
    objection = AddressPolicy().find_url_objection(f"https://{host}:8788/hook")
    assert objection is not None
    assert "not a public address" in objection


def test_url_with_another_name_is_accepted() -> None:
    """What a name resolves to is checked before each connection."""
    assert AddressPolicy().find_url_objection("https://receiver.example/") is None

"""Which addresses webhooks may reach: public ones, and networks that the operator allows (protection against SSRF).

Each address is checked before a connection (`webhooks.delivery.send`), so a name that later resolves to another one
does not bypass it. The check when an endpoint is created only warns early.

An address may embed another one, and a router may forward to that: IPv4-mapped, NAT64, 6to4, Teredo. All of them must
be allowed. Sources: the special-purpose registries of IANA, RFC 4291, 6052, 3056 and 4380.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

SETTING = "EVALSTOP_WEBHOOK_NETWORKS"
ANY = "any"

METADATA: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # link-local, where nearly every cloud serves credentials, at .169.254 and .170.2
            "fe80::/10",
            "fd00:ec2::/32",  # the same for AWS over IPv6
            "fd20:ce::254/128",  # Google
            "100.100.100.200/32",  # Alibaba, among addresses shared by providers
            "168.63.129.16/32",  # Azure, among public addresses
            "192.0.0.192/32",  # Oracle
        ),
    )
)
"""Addresses where clouds serve credentials: allowed only by a network within one of these, never by a wider one."""

_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_UNICAST = IPv6Network("2000::/3")

# Some Python releases treat these as public.
_NOT_PUBLIC: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
    )
)


class AddressRefused(OSError):
    """The address policy forbids a connection; the message says why and which setting would allow it."""


def check_network(text: str) -> str:
    """A network in CIDR notation; raises ValueError when invalid."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a network such as 10.0.0.0/8 or 2001:db8::/32") from None


def is_within(address: str, networks: Sequence[str]) -> bool:
    """Whether an address is in one of these networks; IPv4-mapped IPv6 counts as IPv4. False for an invalid address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return any((mapped or parsed) in ipaddress.ip_network(network) for network in networks)


@dataclass(frozen=True)
class AddressPolicy:
    """Allows public addresses and those of the `allowed` networks."""

    allowed: tuple[Network, ...] = ()

    def find_objection(self, address: str) -> str | None:
        """Why nothing may be sent to this address, and which setting would allow it; None when it is allowed."""
        parsed = ipaddress.ip_address(address)
        for inner in _contained_addresses(parsed):
            if not self._allows(inner):
                carried = "" if inner == parsed else f", which contains {inner}"
                return (
                    f"{address}{carried} is not a public address; {SETTING}={inner} on the service would allow it"
                    if not _metadata_networks(inner)
                    else f"{address}{carried} is where clouds serve credentials; only {SETTING}={inner} allows it"
                )
        return None

    def find_url_objection(self, url: str) -> str | None:
        """Why nothing could be sent to the address that a URL states; None for another name, which may change."""
        host = urlsplit(url).hostname or ""
        numeric = "127.0.0.1" if host == "localhost" else host
        try:
            # By the system, which also reads obsolete notations such as 127.1 and 0x7f000001.
            (*_, address), *_ = socket.getaddrinfo(numeric, None, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return None
        return self.find_objection(str(address[0]))

    def _allows(self, address: Address) -> bool:
        metadata = _metadata_networks(address)
        if metadata:
            return any(
                address in network and any(_is_within(network, metadata_network) for metadata_network in metadata)
                for network in self.allowed
            )
        return _is_public(address) or any(address in network for network in self.allowed)


def parse_address_policy(text: str | None) -> AddressPolicy:
    """The policy of the setting: comma-separated networks, or `any`; raises ValueError."""
    if text is None:
        return AddressPolicy()
    if text.strip() == ANY:
        return AddressPolicy((IPv4Network("0.0.0.0/0"), IPv6Network("::/0")))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return AddressPolicy(tuple(ipaddress.ip_network(part) for part in parts))
    except ValueError as error:
        raise ValueError(
            f"{error}: write networks as 127.0.0.0/8,10.20.0.0/16,::1/128, or {ANY} for all of them"
        ) from None


def _contained_addresses(address: Address) -> Iterator[Address]:
    """The addresses that a packet to this one may reach."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped  # the same address in another notation
        return
    if address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFF_FFFF)
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _COMPATIBLE and int(address) > 1:
        yield IPv4Address(int(address))


def _is_public(address: Address) -> bool:
    if address.version == 6 and address not in _UNICAST:
        return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not special


def _metadata_networks(address: Address) -> list[Network]:
    return [network for network in METADATA if address in network]


def _is_within(network: Network, other: Network) -> bool:
    if isinstance(network, IPv4Network):
        return isinstance(other, IPv4Network) and network.subnet_of(other)
    return isinstance(other, IPv6Network) and network.subnet_of(other)

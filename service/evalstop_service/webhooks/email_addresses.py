"""Addresses of endpoints that get e-mail: `mailto:ADDRESS`, or `mailto:owner` for the owner of each run. Pure."""

from __future__ import annotations

import re

SCHEME = "mailto:"

OWNER = "owner"

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", re.ASCII)


def is_address(text: str) -> bool:
    """Whether a text is one e-mail address: no name beside it, no list, no line breaks."""
    return len(text) <= 254 and _ADDRESS.fullmatch(text) is not None


def is_mail_url(url: str) -> bool:
    """Whether this is the address of an endpoint that gets e-mail."""
    recipient = url.removeprefix(SCHEME)
    return recipient != url and (recipient == OWNER or is_address(recipient))

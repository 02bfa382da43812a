"""URLs of e-mail endpoints: `mailto:ADDRESS`, or `mailto:owner` for the owner of each run. Pure."""

from __future__ import annotations

import re

SCHEME = "mailto:"

OWNER = "owner"

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", re.ASCII)


def is_address(text: str) -> bool:
    """Whether a text is a single bare e-mail address: no display name, no list, no line breaks."""
    return len(text) <= 254 and _ADDRESS.fullmatch(text) is not None


def is_mail_url(url: str) -> bool:
    """Whether a URL is that of an e-mail endpoint."""
    recipient = url.removeprefix(SCHEME)
    return recipient != url and (recipient == OWNER or is_address(recipient))

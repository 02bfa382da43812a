"""Links added to an event when it is sent: to the page of its run or policy, and for people to act on a stop. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable
from uuid import UUID


def locate_run(public_url: str, run_id: UUID) -> str:
    """The URL of a run's page."""
    return f"{public_url}/runs/{run_id}"


def add_url(body: str, public_url: str | None, run_id: UUID) -> str:
    """Add the page of the run, policy or project to a JSON event as `url`; without a public URL it stays as it is."""
    if public_url is None:
        return body
    pages = {"run": locate_run(public_url, run_id), "project": f"{public_url}/"}
    page = pages.get(body.removeprefix('{"type":"').partition(".")[0], f"{public_url}/policies")
    return f'{{"url":{json.dumps(page)},{body[1:]}'


def locate_act_page(public_url: str | None, delivery_id: UUID, secret: str) -> str | None:
    """The URL that lets the recipient of a message act on the stop that it announces; None without a public URL."""
    return None if public_url is None else f"{public_url}/act/{delivery_id}/{_sign(delivery_id, secret)}"


def verify_act_token(token: str, delivery_id: UUID, secrets: Iterable[str]) -> bool:
    """Whether the token of such a URL was signed with one of these secrets."""
    # Compared as bytes: a text that is not ASCII cannot be.
    return any(hmac.compare_digest(token.encode(), _sign(delivery_id, secret).encode()) for secret in secrets)


def _sign(delivery_id: UUID, secret: str) -> str:
    # Webhooks are signed with the same secret: what they sign begins with the id of an event and never with this text.
    signed = hmac.digest(secret.encode(), b"act from a message: " + delivery_id.bytes, hashlib.sha256)
    return base64.urlsafe_b64encode(signed[:24]).decode()

"""Endpoints that receive e-mail: an address needs the format `email`, and the format an address."""

from __future__ import annotations

import httpx
import pytest

from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.routes import ENDPOINT


@pytest.mark.parametrize("url", ["mailto:ops@example.org", "mailto:owner"])
def test_email_endpoint_is_created_and_tested(admin: httpx.Client, url: str) -> None:
    """It is listed and audited by its address, and its test says that no mail server is configured."""
    endpoint = expect_json(admin.post("/endpoints", json=ENDPOINT | {"url": url, "format": "email"}), 201)
    assert endpoint["url"] == url
    assert expect_json(admin.get("/audit"), 200)["items"][0]["details"]["host"] == url
    tested = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
    assert (tested["delivered"], tested["error"]) == (False, "not sent: EVALSTOP_SMTP_HOST is not set")
    expect_problem(admin.patch(f"/endpoints/{endpoint['id']}", json={"format": "slack"}), 422)
    assert expect_json(admin.get("/endpoints"), 200)["items"][0]["format"] == "email"


@pytest.mark.parametrize(
    "invalid",
    [
        {"url": "mailto:ops@example.org", "format": "standard"},
        {"url": "https://93.184.216.34/", "format": "email"},
        {"url": "mailto:ops@example.org,lee@example.org", "format": "email"},
        {"url": "mailto:ops@example.org?cc=lee@example.org", "format": "email"},
        {"url": "mailto:Ops <ops@example.org>", "format": "email"},
        {"url": "mailto:", "format": "email"},
    ],
)
def test_mismatched_address_and_format_is_refused(admin: httpx.Client, invalid: dict[str, str]) -> None:
    """The URL must be one plain address with the format `email`, and no other combination."""
    expect_problem(admin.post("/endpoints", json=ENDPOINT | invalid), 422)

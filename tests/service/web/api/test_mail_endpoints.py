"""Endpoints that get e-mail: their addresses go with their format."""

from __future__ import annotations

import pytest

from tests.service.web.api.api_calls import ENDPOINT, expect_json, expect_problem
from tests.service.web.api.conftest import Service


@pytest.mark.parametrize("url", ["mailto:ops@example.org", "mailto:owner"])
def test_an_endpoint_may_be_an_address(service: Service, url: str) -> None:
    """It is made, shown, recorded by its address, and its test says that there is no mail server."""
    admin = service.open_client(service.create_project())
    made = expect_json(admin.post("/endpoints", json=ENDPOINT | {"url": url, "format": "email"}), 201)
    assert made["url"] == url
    assert expect_json(admin.get("/audit"), 200)["items"][0]["details"]["host"] == url
    tested = expect_json(admin.post(f"/endpoints/{made['id']}/test"), 200)
    assert (tested["delivered"], tested["error"]) == (False, "not sent: EVALSTOP_SMTP_HOST is not set")
    expect_problem(admin.patch(f"/endpoints/{made['id']}", json={"format": "slack"}), 422)
    assert expect_json(admin.get("/endpoints"), 200)["items"][0]["format"] == "email"


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "mailto:ops@example.org", "format": "standard"},
        {"url": "https://93.184.216.34/", "format": "email"},
        {"url": "mailto:ops@example.org,lee@example.org", "format": "email"},
        {"url": "mailto:ops@example.org?cc=lee@example.org", "format": "email"},
        {"url": "mailto:Ops <ops@example.org>", "format": "email"},
        {"url": "mailto:", "format": "email"},
    ],
)
def test_addresses_and_formats_that_do_not_fit_are_refused(service: Service, wrong: dict[str, str]) -> None:
    """One address and nothing beside it, with the format email and no other."""
    admin = service.open_client(service.create_project())
    expect_problem(admin.post("/endpoints", json=ENDPOINT | wrong), 422)

"""What receivers report, as the service validates it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from evalstop_client.receivers.stop.execution import ReportClient
from evalstop_client.receivers.stop.state_machine import Report
from evalstop_service.web.api.decisions import ReportIn
from evalstop_service.web.api.json_body import load

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.receivers.conformance import make_stop_request


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        ("\x1b[31mgone\x1b[0m\r\n", " [31mgone [0m \n"),
        ("half of a pair: \ud800", "half of a pair:  "),
        ({"a\0": [1, 2.5, None, True, {"b": "\0"}]}, {"a ": [1, 2.5, None, True, {"b": " "}]}),
    ],
)
def test_report_is_accepted_whatever_a_scheduler_prints(
    value: Any, reported: Any, server: FakeServer, service: FakeService
) -> None:
    """Details and reason hold only what the service accepts: a refused report would leave the stop unconfirmed."""
    client = ReportClient(server.url, KEY)
    client.send(make_stop_request({}), Report("confirmed", "502 Bad Gateway\r\n", {"said": value}))
    ((_, report),) = service.reports
    accepted = ReportIn.model_validate(load(json.dumps(report).encode()))
    assert (accepted.reason, accepted.details) == ("502 Bad Gateway \n", {"said": reported})

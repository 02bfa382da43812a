"""Events as Slack messages: content, and text from users that stays text."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from evalstop_service.domain.event_types import EventType
from evalstop_service.webhooks.channels import Format, render_body
from evalstop_service.webhooks.events import DECLARATIONS, build_example
from evalstop_service.webhooks.links import add_url
from hypothesis import given
from hypothesis import strategies as st


def read_lines(body: str) -> list[str]:
    lines: list[str] = json.loads(render_body(Format.SLACK, body))["text"].split("\n")
    return lines


@pytest.mark.parametrize("event_type", EventType)
def test_every_event_has_a_message(event_type: EventType) -> None:
    """A message begins with its run or other subject, and ends with its project."""
    first, *_, last = read_lines(json.dumps(build_example(event_type)))
    about_no_run = event_type.startswith(("policy.", "project.", "endpoint."))
    assert about_no_run or first == f"*ppo-7b-seed3* {DECLARATIONS[event_type].headline}"
    assert "project alignment" in last


def test_digest_is_a_message_for_a_lead() -> None:
    """The headline has the stops and the GPU-hours that they saved, and each figure has its words."""
    headline, *details, _ = read_lines(json.dumps(build_example(EventType.DIGEST)))
    assert headline == "*alignment*, the week until 2026-01-12: 12 stops, 310 GPU-hours saved"
    assert details == [
        "*Stops carried out*: 12: 9 right, 1 false, 2 not known",
        "*Recorded only*: 4, would have saved 41.5 GPU-hours",
        "*Vetoed*: 2",
        "*GPU-hours*: 310.5 saved, about 12.0 lost to false stops",
        "*To label*: 2",
        "*Ready for the next stage*: early may move from shadow to canary",
    ]


def test_message_links_to_the_page_of_its_run() -> None:
    """With the address of the dashboard, a message links to its run, to the policies, or to the overview."""
    run_id = UUID("0199aa0d-1111-7e22-8f33-445566778899")
    pages = {}
    for event_type in (EventType.STOPPED, EventType.ROLLOUT_STAGE_CHANGED, EventType.DIGEST):
        plain = json.dumps(build_example(event_type), separators=(",", ":"))
        assert add_url(plain, None, run_id) == plain
        sent = add_url(plain, "https://evalstop.example", run_id)
        assert json.loads(sent) == json.loads(plain) | {"url": json.loads(sent)["url"]}
        pages[event_type] = read_lines(sent)[-1].split(" · ")[-1]
    assert pages == {
        EventType.STOPPED: f"<https://evalstop.example/runs/{run_id}|Open in EvalStop>",
        EventType.ROLLOUT_STAGE_CHANGED: "<https://evalstop.example/policies|Open in EvalStop>",
        EventType.DIGEST: "<https://evalstop.example/|Open in EvalStop>",
    }


@given(name=st.text(max_size=2000), reason=st.text(max_size=5000))
def test_user_text_is_never_interpreted(name: str, reason: str) -> None:
    """Whatever a run is called, a message has no mentions, no links and no lines of its own, and is bounded."""
    event: dict[str, Any] = build_example(EventType.STOP_REQUESTED)
    data = event["data"] | {"run": event["data"]["run"] | {"name": name}}
    data["verdict"] = data["verdict"] | {"reason": reason}
    lines = read_lines(json.dumps(event | {"data": data}))
    assert not any("<" in line or ">" in line for line in lines)
    assert len(lines) <= 8
    assert all(len(line) <= 4000 for line in lines)

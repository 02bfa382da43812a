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


@pytest.mark.parametrize("event_type", EventType)
def test_every_event_has_a_message(event_type: EventType) -> None:
    """A message has a text and blocks within Slack's limits, and names its run or other subject."""
    message = json.loads(render_body(Format.SLACK, json.dumps(build_example(event_type))))
    assert set(message) == {"text", "blocks"}
    about_no_run = event_type.startswith(("policy.", "project.", "endpoint."))
    assert about_no_run or message["text"] == f"*ppo-7b-seed3* {DECLARATIONS[event_type].headline}"
    assert message["blocks"][0]["text"]["text"] == message["text"]
    assert "project alignment" in message["blocks"][-1]["elements"][0]["text"]
    assert all(len(json.dumps(block)) < 3000 for block in message["blocks"])


def test_digest_is_a_message_for_a_lead() -> None:
    """The headline has the stops and the GPU-hours that they saved, and each figure has its words."""
    message = json.loads(render_body(Format.SLACK, json.dumps(build_example(EventType.DIGEST))))
    assert message["text"] == "*alignment*, the week until 2026-01-12: 12 stops, 310 GPU-hours saved"
    details = [block["text"]["text"] for block in message["blocks"][1:-1]]
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
        pages[event_type] = json.loads(render_body(Format.SLACK, sent))["blocks"][-1]["elements"][0]["text"].split(
            " · "
        )[-1]
    assert pages == {
        EventType.STOPPED: f"<https://evalstop.example/runs/{run_id}|Open in EvalStop>",
        EventType.ROLLOUT_STAGE_CHANGED: "<https://evalstop.example/policies|Open in EvalStop>",
        EventType.DIGEST: "<https://evalstop.example/|Open in EvalStop>",
    }


@given(name=st.text(max_size=2000), reason=st.text(max_size=5000))
def test_user_text_is_never_interpreted(name: str, reason: str) -> None:
    """Whatever a run is called, a message has no mentions and no links, and stays within Slack's limits."""
    event: dict[str, Any] = build_example(EventType.STOP_REQUESTED)
    data = event["data"] | {"run": event["data"]["run"] | {"name": name}}
    data["verdict"] = data["verdict"] | {"reason": reason}
    message = json.loads(render_body(Format.SLACK, json.dumps(event | {"data": data})))
    for block in message["blocks"]:
        text = block["text"]["text"] if block["type"] == "section" else block["elements"][0]["text"]
        assert "<" not in text
        assert ">" not in text
        assert len(text) <= 3000

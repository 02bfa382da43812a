"""Events as Microsoft Teams cards, e-mail and Slack messages: content, and text from users that stays text."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from evalstop_service.domain.event_types import PENDING_EVENTS, EventType
from evalstop_service.webhooks.channels import Format, render_body
from evalstop_service.webhooks.delivery.mail import write_message
from evalstop_service.webhooks.events import DECLARATIONS, build_example
from evalstop_service.webhooks.links import add_url
from hypothesis import given
from hypothesis import strategies as st

RUN_ID = UUID("0199aa0d-1111-7e22-8f33-445566778899")


def parse_card(body: str) -> dict[str, Any]:
    (attachment,) = json.loads(render_body(Format.TEAMS, body))["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card: dict[str, Any] = attachment["content"]
    return card


def read_lines(body: str) -> list[str]:
    """The lines of the message for Slack."""
    lines: list[str] = json.loads(render_body(Format.SLACK, body))["text"].split("\n")
    return lines


@pytest.mark.parametrize("event_type", EventType)
def test_every_event_has_a_card_and_a_mail(event_type: EventType) -> None:
    """A card and a mail start with what happened to which run, and link to its page."""
    plain = json.dumps(build_example(event_type), separators=(",", ":"))
    headline = DECLARATIONS[event_type].headline or "EvalStop can reach this channel"
    card, mail = parse_card(plain), render_body(Format.EMAIL, plain)
    texts = ["".join(run["text"] for run in block["inlines"]) for block in card["body"]]
    subject, _, content = mail.partition("\n\n")
    assert headline in texts[0]
    assert subject == texts[0]
    assert event_type not in mail, "people do not read names that are for programs"
    assert texts[-1] in content
    assert "actions" not in card
    sent = add_url(plain, "https://evalstop.example", RUN_ID)
    page = json.loads(sent)["url"]
    assert [action["url"] for action in parse_card(sent)["actions"]] == [page]
    assert page in render_body(Format.EMAIL, sent).splitlines()


def test_message_names_no_detector() -> None:
    """The reason is in words: names of detectors are for programs."""
    event = build_example(EventType.STOP_PENDING)
    evidence = event["data"]["verdict"]["evidence"][0] | {"note": "3 evals in a row fell"}
    verdict = event["data"]["verdict"] | {"reason": "k_decline: 3 evals in a row fell", "evidence": [evidence]}
    mail = render_body(Format.EMAIL, json.dumps(event | {"data": event["data"] | {"verdict": verdict}}))
    assert "Reason: 3 evals in a row fell" in mail.splitlines()


def test_message_says_what_a_person_needs_to_decide() -> None:
    """A message begins with the owner, and says when the stop goes out, how far the run is, and what the stop saves."""
    mail = render_body(Format.EMAIL, json.dumps(build_example(EventType.STOP_PENDING)))
    assert mail.splitlines() == [
        "ppo-7b-seed3 will be stopped unless somebody vetoes it",
        "",
        "ppo-7b-seed3 will be stopped unless somebody vetoes it.",
        "Owner: dana@example.org",
        "When: 2026-01-01 14:46 UTC, 15m after this message",
        "Reason: 3 evals in a row fell",
        "Step: 150 of 2,000 planned",
        "Best checkpoint: step 120, score 0.71, s3://runs/ppo-7b-seed3/120",
        "GPU-hours left: 41.5",
        "",
        "project alignment · 2026-01-01 14:31 UTC",
    ]


@pytest.mark.parametrize("form", [form for form in Format if form is not Format.STANDARD])
def test_only_messages_about_a_pending_stop_hold_a_link_to_act(form: Format) -> None:
    """People get the link with the announcement of a pending stop if their project allows it; receivers never do."""
    url = "https://evalstop.example/act/0199aa0e-9999-7a11-8b22-c3d4e5f60718/c2lnbmVk"
    for event_type in EventType:
        event = build_example(event_type)
        assert (url in render_body(form, json.dumps(event), url)) == (event_type in PENDING_EVENTS)
        assert url not in render_body(Format.STANDARD, json.dumps(event), url)
        forbidden = event | {"data": event["data"] | {"act_from_messages": False}}
        assert url not in render_body(form, json.dumps(forbidden), url)


@pytest.mark.parametrize("event_type", EventType)
def test_every_event_has_a_slack_message(event_type: EventType) -> None:
    """A message begins with its run or other subject, and ends with its project."""
    first, *_, last = read_lines(json.dumps(build_example(event_type)))
    about_no_run = event_type.startswith(("policy.", "project.", "endpoint."))
    assert about_no_run or first == f"ppo-7b-seed3 {DECLARATIONS[event_type].headline}"
    assert "project alignment" in last


def test_digest_is_a_message_for_a_lead() -> None:
    """The headline has the stops and the GPU-hours that they saved, and each figure has its words."""
    headline, *details, _ = read_lines(json.dumps(build_example(EventType.DIGEST)))
    assert headline == "alignment, the week until 2026-01-12: 12 stops, 310 GPU-hours saved"
    assert details == [
        "Stops carried out: 12: 9 right, 1 false, 2 not known",
        "Recorded only: 4, would have saved 41.5 GPU-hours",
        "Vetoed: 2",
        "GPU-hours: 310.5 saved, about 12.0 lost to false stops",
        "To label: 2",
        "Ready for the next stage: early may move from shadow to canary",
    ]


def test_message_links_to_the_page_of_its_run() -> None:
    """With the address of the dashboard, a message links to its run, to the policies, or to the overview."""
    pages = {}
    for event_type in (EventType.STOPPED, EventType.ROLLOUT_STAGE_CHANGED, EventType.DIGEST):
        plain = json.dumps(build_example(event_type), separators=(",", ":"))
        assert add_url(plain, None, RUN_ID) == plain
        sent = add_url(plain, "https://evalstop.example", RUN_ID)
        assert json.loads(sent) == json.loads(plain) | {"url": json.loads(sent)["url"]}
        pages[event_type] = read_lines(sent)[-1].split(" · ")[-1]
    assert pages == {
        EventType.STOPPED: f"<https://evalstop.example/runs/{RUN_ID}|Open in EvalStop>",
        EventType.ROLLOUT_STAGE_CHANGED: "<https://evalstop.example/policies|Open in EvalStop>",
        EventType.DIGEST: "<https://evalstop.example/|Open in EvalStop>",
    }


@given(name=st.text(max_size=2000), reason=st.text(max_size=5000))
def test_user_text_is_never_interpreted(name: str, reason: str) -> None:
    """Whatever a run is called, a card shows it as text of bounded length, a mail gets no header from it, and a message
    for Slack has no mentions, no links and no lines of its own."""
    event: dict[str, Any] = build_example(EventType.STOP_REQUESTED)
    data = event["data"] | {"run": event["data"]["run"] | {"name": name}}
    data["verdict"] = data["verdict"] | {"reason": reason}
    body = json.dumps(event | {"data": data})
    blocks = parse_card(body)["body"]
    assert all(run["type"] == "TextRun" and len(run["text"]) <= 700 for block in blocks for run in block["inlines"])
    message = write_message("a@example.org", "b@example.org", "1", render_body(Format.EMAIL, body))
    assert message.keys()[:3] == ["From", "To", "Subject"]
    assert len(message.keys()) == len(set(message.keys())) == 9
    assert message.as_bytes().count(b"\nSubject: ") == 1
    lines = read_lines(body)
    assert not any("<" in line or ">" in line for line in lines)
    assert len(lines) <= 8
    assert all(len(line) <= 4000 for line in lines)

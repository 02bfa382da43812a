"""Events as Microsoft Teams cards and as e-mail: content, and text from users that stays text."""

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


@given(name=st.text(max_size=2000), reason=st.text(max_size=5000))
def test_user_text_is_never_interpreted(name: str, reason: str) -> None:
    """Whatever a run is called, a card shows it as text of bounded length, and a mail gets no header from it."""
    event: dict[str, Any] = build_example(EventType.STOP_REQUESTED)
    data = event["data"] | {"run": event["data"]["run"] | {"name": name}}
    data["verdict"] = data["verdict"] | {"reason": reason}
    body = json.dumps(event | {"data": data})
    blocks = parse_card(body)["body"]
    assert all(run["type"] == "TextRun" and len(run["text"]) <= 600 for block in blocks for run in block["inlines"])
    message = write_message("a@example.org", "b@example.org", "1", render_body(Format.EMAIL, body))
    assert message.keys()[:3] == ["From", "To", "Subject"]
    assert len(message.keys()) == len(set(message.keys())) == 9
    assert message.as_bytes().count(b"\nSubject: ") == 1

"""Owner, group, tags and notes of runs over HTTP: set on opening, changed later, and used as filters."""

from __future__ import annotations

import httpx
import pytest
from evalstop_service.settings import Settings

from tests.fixtures.http_server import start_server
from tests.service.web.api.api_calls import create_decision, expect_json, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.web.api.routes import ENDPOINT

DESCRIPTION = {"owner": "dana@example.org", "group": "ppo-7b", "tags": ["baseline", "seed 3"], "notes": "two\nlines"}


def test_description_is_set_changed_and_filtered_by(admin: httpx.Client) -> None:
    """Opening a run again fills empty fields only, null clears a field, and lists are filtered by each."""
    run = expect_json(admin.post("/runs", json={"name": "one", "labels": {"team": "a=b"}, **DESCRIPTION}), 201)
    assert {name: run[name] for name in DESCRIPTION} == DESCRIPTION
    other = expect_json(admin.post("/runs", json={"name": "two"}), 201)
    assert [other[name] for name in DESCRIPTION] == [None, None, [], ""]

    changed = expect_json(
        admin.patch(f"/runs/{run['id']}", json={"notes": "read by a person", "tags": ["b", "b"]}), 200
    )
    assert {name: changed[name] for name in DESCRIPTION} == DESCRIPTION | {"notes": "read by a person", "tags": ["b"]}
    reopened = expect_json(admin.post("/runs", json={"name": "one", **DESCRIPTION}), 200)
    assert (reopened["notes"], reopened["tags"]) == ("read by a person", ["b"])
    assert expect_json(admin.patch(f"/runs/{other['id']}", json={"owner": "lee"}), 200)["owner"] == "lee"
    assert expect_json(admin.post("/runs", json={"name": "two", **DESCRIPTION}), 200)["group"] == "ppo-7b"

    terms = {"policy": run["policy"]["name"], "mode": run["mode"]}
    for query, names in (
        ({"owner": "dana@example.org"}, ["one"]),
        ({"group": "ppo-7b"}, ["two", "one"]),
        ({"group": "ppo-7b", "tag": "seed 3"}, ["two"]),
        ({"label": "team=a=b"}, ["one"]),
        ({"label": ["team=a=b", "team=c"]}, []),
        ({"status": "running", "verdict": "continue", **terms}, ["two", "one"]),
        ({"since": "2001-01-01T00:00:00Z", "name": "on"}, ["one"]),
        ({"until": "2001-01-01T00:00:00Z"}, []),
        ({"limit": 1}, ["two"]),
        ({"limit": 1, "cursor": other["id"]}, ["one"]),
    ):
        items = expect_json(admin.get("/runs", params=query), 200)["items"]
        assert [item["name"] for item in items] == names, query

    assert expect_json(admin.patch(f"/runs/{run['id']}", json=dict.fromkeys(DESCRIPTION)), 200)["tags"] == []
    assert expect_json(admin.get("/runs", params={"owner": "dana@example.org"}), 200)["items"] == []
    entry = next(item for item in expect_json(admin.get("/audit"), 200)["items"] if item["action"] == "run.described")
    assert entry["details"] == {"owner": None, "group": None, "tags": [], "notes": "0 characters"}


def test_notes_at_steps_are_added_by_step_and_removed(admin: httpx.Client) -> None:
    """A run's notes come by step with their authors, outlive its opening again, and one can be removed."""
    run = expect_json(admin.post("/runs", json={"name": "one"}), 201)
    path = f"/runs/{run['id']}/notes"
    for step, text in ((40, "new data"), (7, "the grader was restarted")):
        noted = expect_json(admin.post(path, json={"step": step, "text": text}), 200)
    assert [(note["step"], note["text"]) for note in noted["step_notes"]] == [
        (7, "the grader was restarted"),
        (40, "new data"),
    ]
    assert {note["author"] for note in noted["step_notes"]} == {"key test"}
    reopened = expect_json(admin.post("/runs", json={"name": "one", **DESCRIPTION}), 200)
    assert reopened["step_notes"] == noted["step_notes"]
    assert admin.delete(f"{path}/{noted['step_notes'][0]['id']}").status_code == 204
    (left,) = expect_json(admin.get(f"/runs/{run['id']}"), 200)["step_notes"]
    assert left["step"] == 40
    actions = [item for item in expect_json(admin.get("/audit"), 200)["items"] if item["action"] == "run.described"]
    assert [item["details"] for item in actions][:2] == [{"step_notes": [40]}, {"step_notes": [7, 40]}]


def test_run_has_a_hundred_notes_at_most(admin: httpx.Client) -> None:
    """A note too many is refused, and the answer says what to do."""
    run = expect_json(admin.post("/runs", json={"name": "one"}), 201)
    for _ in range(100):
        expect_json(admin.post(f"/runs/{run['id']}/notes", json={"step": 1, "text": "again"}), 200)
    problem = expect_problem(admin.post(f"/runs/{run['id']}/notes", json={"step": 1, "text": "again"}), 409)
    assert "remove one first" in problem["detail"]


def test_run_responses_include_the_page_url(service: Service) -> None:
    """With a public URL, single runs, lists and changes include the URL of the run's page."""
    key = {"Authorization": f"Bearer {service.create_key(service.create_project())}"}
    settings = Settings(public_url="https://evalstop.example")
    with (
        start_server(service.database, settings) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=key, trust_env=False, timeout=60) as api,
    ):
        run = expect_json(api.post("/runs", json={"name": "one"}), 201)
        path = f"/runs/{run['id']}"
        answers = [
            run,
            expect_json(api.get(path), 200),
            *expect_json(api.get("/runs"), 200)["items"],
            expect_json(api.patch(path, json={"owner": "lee"}), 200),
            expect_json(api.post(f"{path}/finish", json={"status": "completed"}), 200),
        ]
    assert [answer["url"] for answer in answers] == [f"https://evalstop.example{path}"] * 5


@pytest.mark.parametrize(
    ("query", "expected_detail"),
    [
        ({"label": "team"}, "NAME=VALUE"),
        ({"label": 'te"am=a'}, "without quotes"),
        ({"verdict": "halt"}, "'continue', 'suspect' or 'stop'"),
        ({"onwer": "dana"}, "there is no such parameter"),
        ({"since": "yesterday"}, "a time as in"),
    ],
)
def test_invalid_filter_is_refused_with_the_right_form(
    admin: httpx.Client, query: dict[str, str], expected_detail: str
) -> None:
    """A filter that cannot match is a 422 instead of a list without it."""
    assert expected_detail in str(expect_problem(admin.get("/runs", params=query), 422))


@pytest.mark.parametrize(
    "body", [{"tags": ["x"] * 51}, {"tags": ["x" * 101]}, {"tags": ["a\nb"]}, {"notes": "x" * 20_001}, {"owner": ""}]
)
def test_description_fields_have_limits(admin: httpx.Client, body: dict[str, object]) -> None:
    """A run has at most 50 tags of 100 characters, and notes of 20,000."""
    expect_problem(admin.post("/runs", json={"name": "one", **body}), 422)


def test_decisions_and_deliveries_can_be_filtered(admin: httpx.Client) -> None:
    """Decisions are filtered by policy and time, deliveries by event type."""
    expect_json(admin.post("/endpoints", json=ENDPOINT), 201)
    decision_id = create_decision(admin)
    for query, ids in (
        ({"policy": "paper", "since": "2001-01-01T00:00Z"}, [decision_id]),
        ({"policy": "default"}, []),
        ({"until": "2001-01-01T00:00Z"}, []),
    ):
        items = expect_json(admin.get("/decisions", params=query), 200)["items"]
        assert [item["id"] for item in items] == ids, query
    for event_type, count in (("run.stop_requested", 1), ("run.stopped", 0)):
        items = expect_json(admin.get("/deliveries", params={"event_type": event_type}), 200)["items"]
        assert [item["event_type"] for item in items] == [event_type] * count

"""`evalstop doctor`: one screen that says why a run is not stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import evalstop
import pytest
from evalstop_client.cli import main
from evalstop_client.cli.diagnosis import DECIDED, Check, EndpointFacts, Facts, Finding, diagnose
from evalstop_client.cli.doctor import gather_facts
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store.database import Database

from tests.clients.real_service import Project, make_project

ENDPOINT = {
    "url": "http://receiver.example/",
    "event_types": ["run.stop_requested"],
    "format": "standard",
    "enabled": True,
    "failures": 0,
    "open_until": None,
}
DELIVERED = {"state": "delivered", "last_error": None}

Examine = Callable[..., dict[str, Any]]


@pytest.fixture
def examine(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examine:
    """Runs the command and gives its document; the exit code has to say whether something blocks."""
    monkeypatch.setenv("EVALSTOP_URL", project.url)

    def run(*words: str, key: str = project.key) -> dict[str, Any]:
        monkeypatch.setenv("EVALSTOP_KEY", key)
        code = main(["doctor", *words, "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == (1 if document["blocked"] else 0)
        return document

    return run


def blocking(document: dict[str, Any]) -> dict[str, str]:
    """What blocks, by the name of the check."""
    return {check["name"]: check["text"] for check in document["checks"] if check["finding"] == "blocks"}


def test_nothing_blocks_a_run_that_may_be_stopped(examine: Examine, project: Project) -> None:
    """With an eval, a checkpoint and enforce all is well, and the newest running run is looked at by default."""
    with project.report_run("well", (0.1, 0.2), total_steps=10):
        document = examine()
    assert (document["run"], blocking(document)) == ("well", {})


def test_a_mistyped_eval_is_named(examine: Examine, project: Project) -> None:
    """A metric that is logged and not watched stands beside the one that has no value."""
    with project.report_run("typo", (), metrics={"gold": {"role": "eval"}}) as run:
        run.log({"gould": 0.5}, step=1)
        assert run.flush()
        assert blocking(examine("typo")) == {
            "eval": "gold has no value yet; not watched: gould",
        }


def test_a_guard_is_named(examine: Examine, project: Project) -> None:
    """A stop on hold says which guard holds it, and what would carry it out; once the run has ended, what held it."""
    paper = project.api.connection.get("/policies/paper")["items"][0]["document"]
    project.api.connection.post("/policies", paper | {"name": "strict", "stops_despite": []})
    with project.report_run("unsaved", with_checkpoints=False, policy="strict"):
        found = blocking(examine("unsaved"))
    assert set(found) == {"checkpoint", "decision"}
    assert found["decision"].startswith("on_hold (no_checkpoint): ")
    (guard,) = [check["text"] for check in examine("unsaved")["checks"] if check["name"] == "guard"]
    assert guard.startswith("the stop was on hold: ")
    assert "checkpoint" in guard


def test_a_shadow_is_told_from_a_project_that_allows_no_more(
    real_service: tuple[str, Database], examine: Examine, project: Project
) -> None:
    """A run that only records, in a project that would let it do more, and in one that would not."""
    shadow = make_project(*real_service, mode="shadow")
    with shadow.report_run("dark"):
        assert set(blocking(examine("dark", key=shadow.key))) == {"mode", "decision"}
        shadow.api.connection.patch("/project", {"max_mode": "shadow"})
        assert set(blocking(examine("dark", key=shadow.key))) == {"project", "mode", "decision"}


def test_what_cannot_be_looked_at_is_not_called_well(
    examine: Examine, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without admin the endpoints are unknown, without read the key blocks, without a service that does."""
    assert set(blocking(examine())) == {"run"}
    with project.report_run("well", (0.1, 0.2)):
        document = examine(key=project.create_key("read"))
        assert [check["name"] for check in document["checks"] if check["finding"] == "unknown"] == ["endpoints"]
        assert set(blocking(examine(key=project.create_key("ingest")))) == {"key"}
        assert set(blocking(examine("--url", "http://127.0.0.1:1"))) == {"service"}
    assert main(["doctor", "nosuch"]) == 1
    assert "no run is called" in capsys.readouterr().err
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    assert main(["doctor", "well"]) == 0
    assert "nothing blocks a stop" in capsys.readouterr().out


@pytest.fixture
def facts(project: Project) -> Facts:
    """Of a run that is well, by a policy that no guard may be overridden of."""
    with project.report_run("well", (0.1, 0.2), policy="early"):
        return gather_facts(evalstop.Api(project.url, project.key), "well")


def blocking_of(facts: Facts) -> list[str]:
    return [check.name for check in diagnose(facts) if check.finding is Finding.BLOCKS]


def find(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_each_thing_that_blocks_is_found(facts: Facts) -> None:
    """A pause, a rollout stage, a guessed role, a fault, silence, a failing endpoint: each by itself blocks."""
    assert facts.run is not None
    run, document = facts.run, facts.run.document
    guessed = {"recognition": document["recognition"] | {"origins": {"eval": "guessed"}}}
    faults = [{"metric": "eval", "kind": "constant", "reason": "it never changes"}]
    stage = {"version": 1, "stage": "shadow", "canary_share": 0.2}
    dead = {"state": "dead", "last_error": "refused"}
    paused = {"paused_at": "2026-01-01T00:00:00Z", "paused_by": "dana", "paused_reason": ""}
    changed: dict[str, tuple[str, Facts]] = {
        "paused": ("project", replace(facts, project=facts.project | paused)),
        "stage": ("policy", replace(facts, stage=stage)),
        "other version": ("policy", replace(facts, stage=stage | {"stage": "enforce", "version": 2})),
        "guessed": ("eval", replace(facts, run=replace(run, document=document | guessed))),
        "no eval": ("eval", replace(facts, run=replace(run, metrics={}))),
        "fault": ("metric", with_health(facts, metric_faults=faults)),
        "stale": ("reports", with_health(facts, state="stale")),
        "failing": ("endpoints", with_endpoint(facts, ENDPOINT | {"failures": 3}, dead)),
        "unsaved": ("checkpoint", replace(facts, checkpoints=0)),
        "dead": ("endpoints", with_endpoint(facts, ENDPOINT, dead)),
    }
    assert blocking_of(facts) == []
    for what, (name, others) in changed.items():
        assert blocking_of(others) == [name], what
    assert blocking_of(replace(facts, checkpoints=0, stops_despite=["no_checkpoint"])) == []


def test_what_is_well_is_said(facts: Facts) -> None:
    """An endpoint that takes stops and had its last one, and a stage that lets all or some through, block nothing."""
    endpoints = diagnose(with_endpoint(facts, ENDPOINT, DELIVERED))
    assert find(endpoints, "endpoints").finding is Finding.OK
    assert find(diagnose(with_endpoint(facts, ENDPOINT, None)), "endpoints").finding is Finding.NOTE
    for others in ([], [EndpointFacts(ENDPOINT | {"format": "slack", "failures": 3}, None)]):
        assert "none receives stops" in find(diagnose(replace(facts, endpoints=others)), "endpoints").text
    cancelled = {"state": "cancelled", "last_error": "the run has ended"}
    failing = find(diagnose(with_endpoint(facts, ENDPOINT | {"failures": 3}, cancelled)), "endpoints")
    assert failing.text == "http://receiver.example/: failures in a row: 3"
    stage = {"version": 1, "stage": "canary", "canary_share": 0.2}
    assert "0.2 of its stops" in find(diagnose(replace(facts, stage=stage)), "policy").text


def test_every_state_of_a_decision_is_explained() -> None:
    """The states that the service knows are those that are explained."""
    assert set(DECIDED) == set(DecisionState)


def with_health(facts: Facts, **changes: Any) -> Facts:
    assert facts.run is not None
    document = facts.run.document
    return replace(facts, run=replace(facts.run, document=document | {"health": document["health"] | changes}))


def with_endpoint(facts: Facts, endpoint: dict[str, Any], delivery: dict[str, Any] | None) -> Facts:
    return replace(facts, endpoints=[EndpointFacts(endpoint, delivery)])

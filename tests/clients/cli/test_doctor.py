"""`evalstop doctor`: why a run is not stopped, on one screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import evalstop
import pytest
from evalstop_client.cli import main
from evalstop_client.cli.doctor import DECIDED, Check, EndpointFacts, Facts, Finding, diagnose, gather_facts
from evalstop_service.domain.decision_lifecycle import DecisionState
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
    """Runs the command and returns its document; the exit code has to match `blocked`."""
    monkeypatch.setenv("EVALSTOP_URL", project.url)

    def run(*arguments: str, key: str = project.key) -> dict[str, Any]:
        monkeypatch.setenv("EVALSTOP_KEY", key)
        code = main(["doctor", *arguments, "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == (1 if document["blocked"] else 0)
        return document

    return run


def list_blocking(document: dict[str, Any]) -> dict[str, str]:
    """The texts of the checks that block, by name."""
    return {check["name"]: check["text"] for check in document["checks"] if check["finding"] == "blocks"}


def test_healthy_run_has_no_blocking_check(examine: Examine, project: Project) -> None:
    """A run with eval, checkpoint and mode enforce is not blocked; by default the newest running run is checked. The
    eval's direction is shown."""
    with project.report_run("well", (0.1, 0.2), total_steps=10):
        document = examine()
    assert (document["run"], list_blocking(document)) == ("well", {})
    (text,) = (check["text"] for check in document["checks"] if check["name"] == "eval")
    assert text == "eval, higher is better: 2 values"


def test_mistyped_eval_is_named(examine: Examine, project: Project) -> None:
    """A metric that is logged but not watched is named beside the eval without values."""
    with project.report_run("typo", (), metrics={"score": {"role": "eval"}}) as run:
        run.log({"scroe": 0.5}, step=1)
        assert run.flush()
        assert list_blocking(examine("typo")) == {
            "eval": "score has no value yet; not watched: scroe",
        }


def test_guard_is_named(examine: Examine, project: Project) -> None:
    """A stop on hold names its guard; after the run's end, the guard that held it."""
    paper = project.api.connection.get("/policies/paper")["items"][0]["document"]
    project.api.connection.post("/policies", paper | {"name": "strict", "stops_despite": []})
    with project.report_run("unsaved", with_checkpoints=False, policy="strict"):
        blocked = list_blocking(examine("unsaved"))
    assert set(blocked) == {"checkpoint", "decision"}
    assert blocked["decision"].startswith("on_hold (no_checkpoint): ")
    (guard,) = [check["text"] for check in examine("unsaved")["checks"] if check["name"] == "guard"]
    assert guard.startswith("the stop was on hold: ")
    assert "checkpoint" in guard


def test_paused_stop_is_not_advised_to_be_released(examine: Examine, project: Project) -> None:
    """A stop on hold in a paused project goes on when the project is resumed; a release would be refused."""
    project.api.connection.post("/project/pause", {"reason": "the eval set is broken"})
    with project.report_run("paused"):
        (advice,) = [check["advice"] for check in examine("paused")["checks"] if check["name"] == "decision"]
    assert "resume" in advice
    assert "release" not in advice


def test_shadow_mode_of_run_and_project_are_distinguished(
    real_service: tuple[str, Database], examine: Examine, project: Project
) -> None:
    """A run in shadow mode blocks, and so does a project that allows only shadow."""
    shadow = make_project(*real_service, mode="shadow")
    with shadow.report_run("dark"):
        assert set(list_blocking(examine("dark", key=shadow.key))) == {"mode", "decision"}
        shadow.api.connection.patch("/project", {"max_mode": "shadow"})
        assert set(list_blocking(examine("dark", key=shadow.key))) == {"project", "mode", "decision"}


def test_checks_without_permission_are_unknown(
    examine: Examine, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without admin the endpoints are unknown; without read, or without a service, the check blocks."""
    assert set(list_blocking(examine())) == {"run"}
    with project.report_run("well", (0.1, 0.2)):
        document = examine(key=project.create_key("read"))
        assert [check["name"] for check in document["checks"] if check["finding"] == "unknown"] == ["endpoints"]
        assert set(list_blocking(examine(key=project.create_key("ingest")))) == {"key"}
        assert set(list_blocking(examine("--url", "http://127.0.0.1:1"))) == {"service"}
    assert main(["doctor", "nosuch"]) == 1
    assert "no run is called" in capsys.readouterr().err
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    assert main(["doctor", "well"]) == 0
    assert "nothing blocks a stop" in capsys.readouterr().out


@pytest.fixture
def facts(project: Project) -> Facts:
    """The facts of a healthy run whose policy overrides no guard."""
    with project.report_run("well", (0.1, 0.2), policy="early"):
        return gather_facts(evalstop.Api(project.url, project.key), "well")


def list_blocking_checks(facts: Facts) -> list[str]:
    return [check.name for check in diagnose(facts) if check.finding is Finding.BLOCKS]


def find_check(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_each_blocking_fact_is_found(facts: Facts) -> None:
    """Pause, rollout stage, guessed role, metric fault, failed detector, staleness and failing endpoint block alone."""
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
        "fault": ("metric", change_health(facts, metric_faults=faults)),
        "failed": ("detectors", change_health(facts, detector_failure="a detector failed at step 3")),
        "stale": ("reports", change_health(facts, state="stale")),
        "failing": ("endpoints", change_endpoint(facts, ENDPOINT | {"failures": 3}, dead)),
        "unsaved": ("checkpoint", replace(facts, checkpoints=0)),
        "dead": ("endpoints", change_endpoint(facts, ENDPOINT, dead)),
    }
    assert list_blocking_checks(facts) == []
    for what, (name, changed_facts) in changed.items():
        assert list_blocking_checks(changed_facts) == [name], what
    assert list_blocking_checks(replace(facts, checkpoints=0, stops_despite=["no_checkpoint"])) == []


def test_own_metrics_are_not_named_as_unwatched(facts: Facts) -> None:
    """What the service stores beside the trainer's metrics is no mistake of the trainer."""
    own = {"metric": "evalstop/paired", "role": None, "count": 1}
    stray = {"metric": "scroe", "role": None, "count": 1}
    checks = diagnose(replace(facts, metrics=[*facts.metrics, own, stray]))
    assert find_check(checks, "metrics").text == "not watched: scroe"


def test_requested_stop_of_an_ended_run_waits_for_a_receiver_alone(examine: Examine, project: Project) -> None:
    """Once the trainer has ended, the doctor does not expect it to read should_stop."""
    project.api.connection.post(
        "/endpoints", {"url": "https://receiver.example/", "event_types": ["run.stop_requested"]}
    )
    project.api.connection.patch("/project", {"veto_window_seconds": 0})
    with project.report_run("over"):
        pass
    (decision,) = [check for check in examine("over")["checks"] if check["name"] == "decision"]
    assert decision["text"].startswith("requested")
    assert "should_stop" not in decision["advice"]


def test_healthy_facts_do_not_block(facts: Facts) -> None:
    """A working endpoint is OK, an unused one is a note, and a canary stage names its share."""
    endpoints = diagnose(change_endpoint(facts, ENDPOINT, DELIVERED))
    assert find_check(endpoints, "endpoints").finding is Finding.OK
    assert find_check(diagnose(change_endpoint(facts, ENDPOINT, None)), "endpoints").finding is Finding.NOTE
    for changed_facts in ([], [EndpointFacts(ENDPOINT | {"format": "slack", "failures": 3}, None)]):
        assert "none receives stops" in find_check(diagnose(replace(facts, endpoints=changed_facts)), "endpoints").text
    cancelled = {"state": "cancelled", "last_error": "the run has ended"}
    failing = find_check(diagnose(change_endpoint(facts, ENDPOINT | {"failures": 3}, cancelled)), "endpoints")
    assert failing.text == "http://receiver.example/: failures in a row: 3"
    stage = {"version": 1, "stage": "canary", "canary_share": 0.2}
    assert "0.2 of its stops" in find_check(diagnose(replace(facts, stage=stage)), "policy").text


def test_every_decision_state_is_explained() -> None:
    """Each DecisionState of the service has an explanation."""
    assert set(DECIDED) == set(DecisionState)


def change_health(facts: Facts, **changes: Any) -> Facts:
    assert facts.run is not None
    document = facts.run.document
    return replace(facts, run=replace(facts.run, document=document | {"health": document["health"] | changes}))


def change_endpoint(facts: Facts, endpoint: dict[str, Any], delivery: dict[str, Any] | None) -> Facts:
    return replace(facts, endpoints=[EndpointFacts(endpoint, delivery)])

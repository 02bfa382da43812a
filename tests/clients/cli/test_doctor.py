"""`evalstop doctor`: why a run is not stopped, on one screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from evalstop_client import Limits, Run
from evalstop_client.cli import main
from evalstop_service.store.database import Database

from tests.clients.real_service import Project, make_project
from tests.clients.runs import list_messages

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


def test_stop_on_hold_and_paused_project_block(examine: Examine, project: Project) -> None:
    """A stop on hold names its guard; a paused project says how to resume it."""
    policies = project.api.connection.get("/policies")["items"]
    paper = next(policy["document"] for policy in policies if policy["name"] == "paper")
    project.api.connection.post("/policies", paper | {"name": "strict", "stops_despite": []})
    with project.report_run("unsaved", with_checkpoints=False, policy="strict"):
        blocked = list_blocking(examine("unsaved"))
        assert set(blocked) == {"decision"}
        assert blocked["decision"].startswith("on_hold (no_checkpoint): ")
        project.api.connection.post("/project/pause", {"reason": "the eval set is broken"})
        assert "evalstop resume" in list_blocking(examine("unsaved"))["project"]


def test_pending_stop_says_until_when(examine: Examine, real_service: tuple[str, Database]) -> None:
    """A stop that waits, for its veto window or for the hours of its project, is no block, but says how long."""
    patient = make_project(*real_service, mode="enforce", veto_window_seconds=3600)
    with patient.report_run("waits"):
        document = examine("waits", key=patient.key)
        due_at = patient.api.run("waits").document["decision"]["due_at"]
    (text,) = (check["text"] for check in document["checks"] if check["name"] == "decision")
    assert text.startswith(f"pending until {due_at}: ")
    assert not list_blocking(document)


def test_last_delivered_stop_is_shown(examine: Examine, project: Project) -> None:
    """Of the deliveries of a stop the last one that a receiver accepted is shown, not one that nobody fetched."""
    connection = project.api.connection
    fetches, _ = (connection.post("/pull/endpoints", {"name": name}) for name in ("fetches", "spare"))
    with project.report_run("falls"):
        project.api.run("falls").stop("over")
        assert not any(check["name"] == "delivery" for check in examine("falls")["checks"])
        path = f"/pull/endpoints/{fetches['id']}"
        (event,) = connection.post(f"{path}/claim", {"wait_seconds": 20})["events"]
        settled = {"delivery_id": event["delivery_id"], "attempt": event["attempt"], "status": 200}
        connection.post(f"{path}/settle", settled)
        (text,) = (check["text"] for check in examine("falls")["checks"] if check["name"] == "delivery")
    assert text.startswith("run.stop_requested was delivered to pull:fetches, ")


def test_guessed_role_blocks(examine: Examine, project: Project) -> None:
    """A role that the service guessed cannot stop the run, and what the service itself stores is not named."""
    with project.report_run("guessed", (), metrics="auto") as run:
        run.log({"eval_gsm8k": 0.5}, step=1)
        assert run.flush()
        assert "was guessed" in list_blocking(examine("guessed"))["eval"]


def test_several_eval_sets_are_one_eval(examine: Examine, project: Project) -> None:
    """The eval of a run with several is their mean, whose values are counted; a guess among them blocks."""
    sets = ("eval_a_loss", "eval_b_loss")
    for name, more in (("guesses", {}), ("known", {"eval_a_runtime": 1.0, "eval_b_runtime": 1.0})):
        with project.report_run(name, (), metrics="auto") as run:
            for step in (1, 2):
                run.log(dict.fromkeys(sets, 1.0 / step) | more, step=step)
            assert run.flush()
            document = examine(name)
            assert project.api.run(name).eval_metric == "evalstop/score"
            assert len(list(project.api.run(name).history())) == 2
        if name == "guesses":
            assert "eval_a_loss, eval_b_loss was guessed" in list_blocking(document)["eval"]
        else:
            (text,) = (check["text"] for check in document["checks"] if check["name"] == "eval")
            expected = "evalstop/score, the mean of eval_a_loss, eval_b_loss, higher is better: 2 values"
            assert text.startswith(expected)


def test_shadow_mode_of_run_and_project_are_distinguished(
    real_service: tuple[str, Database], examine: Examine, project: Project
) -> None:
    """A run in shadow mode blocks, and so does a project that allows only shadow."""
    shadow = make_project(*real_service, mode="shadow")
    with shadow.report_run("dark"):
        assert set(list_blocking(examine("dark", key=shadow.key))) == {"mode", "decision"}
        shadow.api.connection.patch("/project", {"max_mode": "shadow"})
        assert set(list_blocking(examine("dark", key=shadow.key))) == {"project", "mode", "decision"}


def test_missing_permission_and_service_block(
    examine: Examine, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the scope read, or without a service, the check blocks."""
    assert set(list_blocking(examine())) == {"run"}
    with project.report_run("well", (0.1, 0.2)):
        assert not list_blocking(examine(key=project.create_key("read")))
        assert set(list_blocking(examine(key=project.create_key("ingest")))) == {"key"}
        assert set(list_blocking(examine("--url", "http://127.0.0.1:1"))) == {"service"}
    assert main(["doctor", "nosuch"]) == 1
    assert "no run is called" in capsys.readouterr().err
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    assert main(["doctor", "well"]) == 0
    assert "nothing blocks a stop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("planned", "steps", "told"),
    [(4, 9, "9 of 4"), (400, 100, "100 of 400"), (400, 201, ""), (400, 399, "")],
    ids=["exceeded", "completed_in_a_quarter", "early_end", "as_planned"],
)
def test_plan_in_another_unit_is_asked_about(
    examine: Examine, project: Project, caplog: pytest.LogCaptureFixture, planned: int, steps: int, told: str
) -> None:
    """A plan that the run exceeds, or of which it completes in half, is asked about, in the log and by the doctor."""
    with Run("planned", url=project.url, key=project.key, total_steps=planned, limits=Limits(flush_seconds=60)) as run:
        run.log({"eval": 0.5}, step=steps)
    asked = "is the plan in "
    assert [asked in text for text in list_messages(caplog) if "total_steps" in text] == ([True] if told else [])
    texts = [check["text"] for check in examine("planned")["checks"] if check["name"] == "length"]
    early = "an early end, or " if steps < planned else ""
    assert texts == ([f"the last step is {told}: {early}is the plan in another unit than the steps?"] if told else [])

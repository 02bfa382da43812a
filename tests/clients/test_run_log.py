"""What a run logs for its trainer: how it is watched, why it is not stopped, and which metrics nobody watches."""

from __future__ import annotations

import logging
from typing import Literal

import pytest
from evalstop_client.spool.run_log import ANSWERS_WITHOUT_EVAL

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import METRICS, list_messages, list_posts, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_finish_names_the_obeyed_decision(server: FakeServer, service: FakeService) -> None:
    """A completed run whose trainer has read should_stop names the decision; a failed one does not."""
    service.stop_at_step = 1
    cases: tuple[tuple[str, Literal["completed", "failed"]], ...]
    cases = (("obeys", "completed"), ("fails", "failed"), ("ignores", "completed"))
    for name, status in cases:
        run = open_run(server, name=name)
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        if name != "ignores":
            assert run.should_stop
        run.finish(status)
    ends = [body for kind, body in list_posts(service) if kind == "finish"]
    of_first = f"decision of {service.find_run('obeys').id}"
    assert ends == [{"status": "completed", "obeyed": of_first}, {"status": "failed"}, {"status": "completed"}]


def test_overrun_plan_is_logged_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """A step past `total_steps` says that the plan no longer counts; the last planned step says nothing."""
    with open_run(server, total_steps=80) as run:
        run.log({"score": 1.0}, step=80)
        assert list_messages(caplog) == []
        for step in (81, 160):
            run.log({"score": 1.0}, step=step)
    (message,) = [text for text in list_messages(caplog) if "total_steps" in text]
    assert message.startswith("evalstop: step 81 is past total_steps=80, which no longer counts")


def test_undone_stop_is_not_obeyed(server: FakeServer, service: FakeService) -> None:
    """A run that ends after its stop was undone names no decision."""
    service.stop_at_step = 1
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        assert run.should_stop
        service.decision_state = "undone"
        run.log({"score": 1.0}, step=2)
        assert run.flush()
        assert not run.should_stop
    assert list_posts(service)[-1] == ("finish", {"status": "completed"})


def test_decision_changes_are_logged(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """The decision has state, reason and guards; the start and each change of state are logged, as a warning if the
    stop waits, or ends the run, and then with the reason of the verdict."""
    caplog.set_level(logging.INFO, "evalstop_client")
    service.stop_at_step, service.decision_state, service.best_checkpoint = 1, "on_hold", {"uri": "file:///1"}
    with open_run(server, mode="enforce") as run:
        assert run.decision is None
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        assert run.decision is not None
        assert (run.decision.state, run.decision.reason) == ("on_hold", "the fake decided it")
        assert (run.decision.guards, run.should_stop) == (("paused",), False)
        assert run.url == f"{server.url}/runs/{run.id}"
        service.decision_state = "requested"
        wait_until(lambda: run.should_stop)
    page = f"{server.url}/runs/run-1"
    assert list_messages(caplog)[:3] == [
        f"evalstop: a run: enforce, policy default@1, {page}",
        f"evalstop: a run: the stop is on_hold: the fake decided it; {page}",
        f"evalstop: a run: the stop is requested: the fake says so; {page}; best checkpoint: file:///1",
    ]
    assert [record.levelname for record in caplog.records][:3] == ["INFO", "WARNING", "WARNING"]


def test_mistyped_metric_is_logged_once(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric name close to a declared one without values is suggested once; other unwatched metrics are not."""
    service.missing = {"score": "eval", "eval_loss": "eval", "val_accuracy": "eval"}
    service.unwatched = ["scroe", "learning_rate", "loss", "train_loss", "train_accuracy"]
    with open_run(server, metrics=METRICS) as run:
        for step in range(3):
            run.log({"scroe": 1.0, "learning_rate": 0.1}, step=step)
            assert run.flush()
    assert list_messages(caplog) == [
        "evalstop: 'scroe' is not declared; 'score' (eval) has no value yet. Did you mean 'score'?",
        "evalstop: the run ended without a value of its eval: the service could decide nothing",
    ]


def test_run_without_watched_metrics_is_logged(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose metrics all have no role logs how to declare roles."""
    service.missing, service.unwatched = {name: name for name in ("eval", "proxy", "kl", "loss")}, ["accuracy"]
    with open_run(server) as run:
        run.log({"accuracy": 1.0}, step=1)
    assert list_messages(caplog)[0].startswith(
        "evalstop: none of accuracy is watched: declare their roles with Run(metrics=...)"
    )


def test_missing_eval_is_logged_after_some_answers(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """With metrics "auto" a missing eval is warned about once, not before a first eval is due."""
    service.missing, service.unwatched = {}, ["accuracy"]
    with open_run(server, metrics="auto") as run:
        for step in range(ANSWERS_WITHOUT_EVAL):
            assert list_messages(caplog) == []
            run.log({"accuracy": 1.0}, step=step)
            assert run.flush()
    assert list_messages(caplog)[0].startswith(
        "evalstop: no eval has come yet, without which nothing is stopped: none of acc"
    )
    assert len(list_messages(caplog)) == 1


def test_reduced_mode_is_logged(server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    """A run opened in a lower mode than requested logs it as the service says it."""
    service.limits = ["mode enforce was requested, but the project allows shadow"]
    with open_run(server, mode="enforce") as run:
        run.flush()
    assert list_messages(caplog)[0] == "evalstop: mode enforce was requested, but the project allows shadow"

"""What a trainer learns of its run: how it is watched, why it is not stopped, and what nobody watches."""

from __future__ import annotations

import logging
from typing import Literal

import pytest
from evalstop_client.spool.run_log import ANSWERS_WITHOUT_EVAL

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import METRICS, list_posts, logged_messages, open_run

pytestmark = pytest.mark.usefixtures("ended_runs")


def test_a_trainer_that_obeys_says_which_decision(server: FakeServer, service: FakeService) -> None:
    """A run that ends after its trainer has read the stop names the decision; one that fails does not."""
    service.stop_at_step = 1
    stories: tuple[tuple[str, Literal["completed", "failed"]], ...]
    stories = (("obeys", "completed"), ("fails", "failed"), ("looks away", "completed"))
    for name, status in stories:
        run = open_run(server, name=name)
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        if name != "looks away":
            assert run.should_stop
        run.finish(status)
    ends = [body for what, body in list_posts(service) if what == "finish"]
    of_first = f"decision of {service.find_run('obeys').id}"
    assert ends == [{"status": "completed", "obeyed": of_first}, {"status": "failed"}, {"status": "completed"}]


def test_a_stop_that_was_taken_back_is_not_obeyed(server: FakeServer, service: FakeService) -> None:
    """A trainer that reads the stop, reads later that it was undone, and ends, has ended by itself."""
    service.stop_at_step = 1
    with open_run(server) as run:
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        assert run.should_stop
        service.decision_state = "undone"
        run.log({"gold": 1.0}, step=2)
        assert run.flush()
        assert not run.should_stop
    assert list_posts(service)[-1] == ("finish", {"status": "completed"})


def test_a_trainer_learns_why_it_is_not_stopped(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """The decision says its state, the reason and the guards; start and each change of state are a line in the log."""
    caplog.set_level(logging.INFO, "evalstop_client")
    service.stop_at_step, service.decision_state = 1, "on_hold"
    with open_run(server, mode="enforce") as run:
        assert run.decision is None
        run.log({"gold": 1.0}, step=1)
        assert run.flush()
        assert run.decision is not None
        assert (run.decision.state, run.decision.reason) == ("on_hold", "the fake decided it")
        assert (run.decision.guards, run.should_stop) == (("paused",), False)
        assert run.url == f"{server.url}/runs/{run.id}"
        service.decision_state = "requested"
        wait_until(lambda: run.should_stop)
    page = f"{server.url}/runs/run-1"
    assert logged_messages(caplog)[:3] == [
        f"evalstop: a run: enforce, policy default@1, {page}",
        f"evalstop: a run: the stop is on_hold: the fake decided it; {page}",
        f"evalstop: a run: the stop is requested: the fake decided it; {page}",
    ]


def test_what_nobody_watches_is_said(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped name is named beside the one that was meant, once; a metric that is merely unwatched is not."""
    service.missing, service.unwatched = {"gold": "eval"}, ["gould", "learning_rate"]
    with open_run(server, metrics=METRICS) as run:
        for step in range(3):
            run.log({"gould": 1.0, "learning_rate": 0.1}, step=step)
            assert run.flush()
    assert logged_messages(caplog) == [
        "evalstop: 'gould' is not declared; 'gold' (eval) has no value yet. Did you mean 'gold'?",
        "evalstop: the run ended without a value of its eval: the service could decide nothing",
    ]


def test_a_run_of_which_nothing_is_watched_says_so(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that declares no roles, and has no metric that is called as one, is told what to write."""
    service.missing, service.unwatched = {name: name for name in ("eval", "proxy", "kl", "loss")}, ["accuracy"]
    with open_run(server) as run:
        run.log({"accuracy": 1.0}, step=1)
    assert logged_messages(caplog)[0].startswith(
        "evalstop: none of accuracy is watched: declare their roles with Run(metrics=...)"
    )


def test_a_run_in_which_no_eval_is_recognized_says_so_after_a_while(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that leaves the roles to the service is told before its end, and not before a first eval is due."""
    service.missing, service.unwatched = {}, ["accuracy"]
    with open_run(server, metrics="auto") as run:
        for step in range(ANSWERS_WITHOUT_EVAL):
            assert logged_messages(caplog) == []
            run.log({"accuracy": 1.0}, step=step)
            assert run.flush()
    assert logged_messages(caplog)[0].startswith(
        "evalstop: no eval has come yet, without which nothing is stopped: none of acc"
    )
    assert len(logged_messages(caplog)) == 1


def test_what_the_project_does_not_allow_is_said(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was opened in another mode than it asked for says which setting is in the way."""
    service.limits = [{"field": "mode", "asked": "enforce", "given": "shadow", "setting": "max_mode"}]
    with open_run(server, mode="enforce") as run:
        run.flush()
    assert logged_messages(caplog)[0] == (
        "evalstop: mode enforce was requested, but the project allows shadow: "
        "a key with the scope admin can change its max_mode"
    )

"""Requests to evaluate now: raised with the observation that caused the suspicion, answered by an observation."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, EvalAnswered, Receipt, Resumed
from evalstop_service.ingest.consequences import OPEN_FOR
from evalstop_service.runs.watched_metrics import PAIRED_METRIC
from evalstop_service.store import run_details, tables
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import EvalRequest
from evalstop_service.store.runs import Run

from tests.service.project_fixture import NOW, ProjectFixture, evals

SCORES = [min(step, 30.0) - 0.3 * max(0, step - 30) + 4.0 * ((step * step * 7) % 11) / 11 for step in range(60)]
"""A noisy rise until step 30, then a slow fall."""


def open_evaluated_run(project: ProjectFixture, eval_share: float | None = 0.0, **options: Any) -> Run:
    run = project.open_run(policy="early", total_steps=90, eval_share=eval_share, **options)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    return run


def post_until_request(project: ProjectFixture, run: Run, scores: Sequence[float] = SCORES) -> EvalRequest:
    for step, score in enumerate(scores):
        receipt = project.post_observations(run, evals(score, start=step))
        if receipt.eval_request is not None:
            return receipt.eval_request
    raise AssertionError("no eval was requested")


def answer_request(
    project: ProjectFixture, run: Run, request: EvalRequest, difference: float, stderr: float = 0.5
) -> Receipt:
    observation = PostedObservation(PAIRED_METRIC, request.step, difference, stderr)
    return project.submit(run, EvalAnswered(request.id, request.attempt, observation, 800, "key test"))


def read_probability(receipt: Receipt) -> float:
    return next(item.value for item in receipt.run.verdict.evidence if item.detector == "posterior")


def test_suspicion_requests_a_paired_evaluation(project: ProjectFixture) -> None:
    """The receipt, a row and one event name the two checkpoints to evaluate."""
    run = open_evaluated_run(project)
    request = post_until_request(project, run)
    assert (request.best_step, request.best_uri, request.multiplier) == (30, "file:///30", 4)
    assert request.probability is not None
    assert request.probability >= 0.3
    assert [row["id"] for row in project.load_rows(tables.eval_requests, run)] == [request.id]
    (event,) = project.load_events(run, "run.eval_requested")
    event_request = json.loads(event["body"])["data"]["request"]
    assert (event_request["id"], event_request["step"], event_request["seed"]) == (
        str(request.id),
        request.step,
        request.seed,
    )
    again = project.post_observations(run, evals(SCORES[request.step + 1], start=request.step + 1))
    assert again.eval_request == request
    assert len(project.load_rows(tables.eval_requests, run)) == 1


def test_no_request_without_evaluator_or_checkpoint(project: ProjectFixture) -> None:
    """Without an evaluator, or without a checkpoint to compare with, there is no request."""
    without_evaluator = open_evaluated_run(project, eval_share=None)
    without_checkpoint = project.open_run(policy="early", total_steps=90, eval_share=0.0)
    for run in (without_evaluator, without_checkpoint):
        project.post_observations(run, evals(*SCORES))
        assert project.load_rows(tables.eval_requests, run) == []


@pytest.mark.parametrize(("difference", "rises"), [(-8.0, True), (0.0, False)])
def test_answer_changes_the_probability(project: ProjectFixture, difference: float, rises: bool) -> None:
    """An answer is an observation at the request's step; the row records the probability after it."""
    run = open_evaluated_run(project)
    request = post_until_request(project, run)
    receipt = answer_request(project, run, request, difference)
    assert receipt.eval_request is None
    (row,) = project.load_rows(tables.eval_requests, run)
    assert (row["difference"], row["stderr"], row["prompts"], row["actor"]) == (difference, 0.5, 800, "key test")
    assert row["probability_after"] == read_probability(receipt)
    assert request.probability is not None
    assert (row["probability_after"] > request.probability) is rises


def test_positive_difference_of_a_loss_is_a_fall(project: ProjectFixture) -> None:
    """For a minimized metric a positive difference raises the probability of a fall."""
    run = open_evaluated_run(project, metrics={"eval": {"role": "eval", "direction": "minimize"}})
    request = post_until_request(project, run, [-score for score in SCORES])
    receipt = answer_request(project, run, request, 8.0)
    assert request.probability is not None
    assert read_probability(receipt) > request.probability


def test_late_answer_counts_as_if_it_were_prompt(project: ProjectFixture) -> None:
    """A late answer gives the verdict of the same observations in order, also in a process that reloads the run."""
    late_run, prompt_run = open_evaluated_run(project), open_evaluated_run(project)
    request, prompt_request = post_until_request(project, late_run), post_until_request(project, prompt_run)
    later_evals = evals(*SCORES[request.step + 1 :], start=request.step + 1)
    project.post_observations(late_run, later_evals[:4])
    answer_request(project, late_run, request, -3.0)
    answer_request(project, prompt_run, prompt_request, -3.0)
    project.post_observations(late_run, later_evals[4:])
    project.post_observations(prompt_run, later_evals)
    assert project.cached_monitor(late_run).evidence == project.cached_monitor(prompt_run).evidence
    evidence = project.cached_monitor(late_run).evidence
    project.drop_monitor_state(late_run)
    project.post_observations(late_run, evals(1.0, start=90))
    project.post_observations(prompt_run, evals(1.0, start=90))
    assert project.cached_monitor(late_run).evidence == project.cached_monitor(prompt_run).evidence != evidence


def test_repeated_answer_changes_nothing(project: ProjectFixture) -> None:
    """The same answer again is a duplicate; another one is a conflict, and the first is kept."""
    run = open_evaluated_run(project)
    request = post_until_request(project, run)
    answer_request(project, run, request, -3.0)
    before = project.load_rows(tables.eval_requests, run)
    assert answer_request(project, run, request, -3.0).duplicates == 1
    assert answer_request(project, run, request, 2.0).conflicts[0].stored_value == -3.0
    assert project.load_rows(tables.eval_requests, run) == before


def test_answer_to_an_earlier_attempt_is_refused(project: ProjectFixture) -> None:
    """After a resume, requests of the earlier attempt are not listed and their answers are refused."""
    run = open_evaluated_run(project)
    request = post_until_request(project, run)
    with project.database.reading() as tx:
        assert [item.id for item in run_details.list_open_requests(tx, project.id, [run.id], NOW, 9)] == [request.id]
        assert run_details.list_open_requests(tx, project.id, [], NOW + OPEN_FOR, 9) == []
    project.submit(run, Resumed(10))
    with project.database.reading() as tx:
        assert run_details.list_open_requests(tx, project.id, [run.id], NOW, 9) == []
    with pytest.raises(Conflict, match="attempt 1"):
        answer_request(project, run, request, -3.0)


@pytest.mark.parametrize("resumed_at", [30, 59])
def test_next_attempt_requests_its_own_evaluation(project: ProjectFixture, resumed_at: int) -> None:
    """It may be at the step of an earlier attempt's request: of one that came later than the resume, or stands."""
    run = open_evaluated_run(project)
    first = post_until_request(project, run)
    project.submit(run, Resumed(resumed_at))
    again = [project.post_observations(run, evals(SCORES[step], start=step)) for step in range(30, first.step + 1)]
    second = again[-1].eval_request
    assert second is not None
    assert (second.attempt, second.step, second.id != first.id) == (2, first.step, True)
    answer_request(project, run, second, -3.0)
    rows = project.load_rows(tables.eval_requests, run)
    assert {(row["attempt"], row["step"]): row["difference"] for row in rows} == {
        (1, first.step): None,
        (2, first.step): -3.0,
    }


def test_open_request_is_reloaded_with_the_run(project: ProjectFixture) -> None:
    """A process without the run in its cache reads the open request from its row."""
    run = open_evaluated_run(project)
    request = post_until_request(project, run)
    project.evict_run(run)
    receipt = project.post_observations(run, evals(SCORES[request.step + 1], start=request.step + 1))
    assert receipt.eval_request == request


def test_answer_can_stop_the_run(project: ProjectFixture) -> None:
    """A verdict changed by an answer becomes a decision in the same transaction."""
    policy = {
        "name": "sensitive",
        "members": [{"detector": "posterior", "stop_at": 0.5, "suspect_at": 0.2}],
        "evaluate_now": {},
    }
    project.add_policy(policy)
    run = project.open_run(policy="sensitive", total_steps=90, eval_share=0.0)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    request = post_until_request(project, run)
    assert project.find_decision(run) is None
    stopped = answer_request(project, run, request, -2.0)
    assert stopped.run.verdict.verdict == "stop"
    assert stopped.decision is not None
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_answer_metric_gets_no_role(project: ProjectFixture) -> None:
    """The metric that answers are stored under is not recognized as one of the run's metrics."""
    run = project.open_run(uuid.uuid4().hex, policy="early", recognise=True, eval_share=0.0, total_steps=90)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    request = None
    for step, score in enumerate(SCORES):
        request = (
            project.post_observations(run, [PostedObservation("eval/accuracy", step, score)]).eval_request or request
        )
    assert request is not None
    assert PAIRED_METRIC not in answer_request(project, run, request, -1.0).run.metrics

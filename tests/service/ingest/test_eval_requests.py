"""Requests to evaluate now: raised with the observation that made the suspicion, answered by an observation."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, EvalAnswered, Receipt, Resumed
from evalstop_service.ingest.eval_requests import OPEN_FOR
from evalstop_service.runs.watched_metrics import PAIRED_METRIC
from evalstop_service.store import eval_requests, policies, projects, tables
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import NOW, ProjectFixture, evals

SCORES = [min(at, 30.0) - 0.3 * max(0, at - 30) + 4.0 * ((at * at * 7) % 11) / 11 for at in range(60)]
"""A noisy rise, and a slow fall from step 30 on."""


def open_run(project: ProjectFixture, eval_share: float | None = 0.0, **terms: Any) -> Run:
    run = project.open_run(policy="early", total_steps=90, eval_share=eval_share, **terms)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    return run


def post_until_asked(project: ProjectFixture, run: Run, scores: Sequence[float] = SCORES) -> EvalRequest:
    for at, score in enumerate(scores):
        receipt = project.post_observations(run, evals(score, start=at))
        if receipt.eval_request is not None:
            return receipt.eval_request
    raise AssertionError("it was never asked for")


def answer(project: ProjectFixture, run: Run, request: EvalRequest, difference: float, stderr: float = 0.5) -> Receipt:
    point = PostedObservation(PAIRED_METRIC, request.step, difference, stderr)
    return project.submit(run, EvalAnswered(request.id, request.attempt, point, 800, "key test"))


def probability(receipt: Receipt) -> float:
    return next(item.value for item in receipt.run.verdict.evidence if item.detector == "posterior")


def test_a_suspicion_asks_for_a_paired_evaluation(project: ProjectFixture) -> None:
    """The answer to the observation, a row and one event say which two checkpoints to evaluate."""
    run = open_run(project)
    request = post_until_asked(project, run)
    assert (request.best_step, request.best_uri, request.multiplier) == (30, "file:///30", 4)
    assert request.probability is not None
    assert request.probability >= 0.3
    assert [row["id"] for row in project.load_rows(tables.eval_requests, run)] == [request.id]
    (event,) = project.load_events(run, "run.eval_requested")
    asked = json.loads(event["body"])["data"]["request"]
    assert (asked["id"], asked["step"], asked["seed"]) == (str(request.id), request.step, request.seed)
    again = project.post_observations(run, evals(SCORES[request.step + 1], start=request.step + 1))
    assert again.eval_request == request
    assert len(project.load_rows(tables.eval_requests, run)) == 1


def test_nobody_is_asked_who_cannot_answer(project: ProjectFixture) -> None:
    """Without a word that somebody evaluates, and without a checkpoint to compare with, there is no request."""
    silent = open_run(project, eval_share=None)
    bare = project.open_run(policy="early", total_steps=90, eval_share=0.0)
    for run in (silent, bare):
        project.post_observations(run, evals(*SCORES))
        assert project.load_rows(tables.eval_requests, run) == []


@pytest.mark.parametrize(("difference", "rises"), [(-8.0, True), (0.0, False)])
def test_an_answer_moves_the_probability(project: ProjectFixture, difference: float, rises: bool) -> None:
    """It is an observation of the request's step; the row says what it changed."""
    run = open_run(project)
    request = post_until_asked(project, run)
    receipt = answer(project, run, request, difference)
    assert receipt.eval_request is None
    (row,) = project.load_rows(tables.eval_requests, run)
    assert (row["difference"], row["stderr"], row["prompts"], row["actor"]) == (difference, 0.5, 800, "key test")
    assert row["probability_after"] == probability(receipt)
    assert request.probability is not None
    assert (row["probability_after"] > request.probability) is rises


def test_a_metric_that_is_minimized_is_turned(project: ProjectFixture) -> None:
    """Of a loss a positive difference is a fall."""
    run = open_run(project, metrics={"eval": {"role": "eval", "direction": "minimize"}})
    request = post_until_asked(project, run, [-score for score in SCORES])
    receipt = answer(project, run, request, 8.0)
    assert request.probability is not None
    assert probability(receipt) > request.probability


def test_an_answer_that_comes_late_counts_as_if_it_had_come_at_once(project: ProjectFixture) -> None:
    """The verdict is that of the same observations in order, and of a process that rebuilds the run."""
    late, prompt = open_run(project), open_run(project)
    request, other = post_until_asked(project, late), post_until_asked(project, prompt)
    rest = evals(*SCORES[request.step + 1 :], start=request.step + 1)
    project.post_observations(late, rest[:4])
    answer(project, late, request, -3.0)
    answer(project, prompt, other, -3.0)
    project.post_observations(late, rest[4:])
    project.post_observations(prompt, rest)
    assert project.cached_monitor(late).evidence == project.cached_monitor(prompt).evidence
    evidence = project.cached_monitor(late).evidence
    project.drop_monitor_state(late)
    project.post_observations(late, evals(1.0, start=90))
    project.post_observations(prompt, evals(1.0, start=90))
    assert project.cached_monitor(late).evidence == project.cached_monitor(prompt).evidence != evidence


def test_an_answer_may_be_sent_again(project: ProjectFixture) -> None:
    """The same answer changes nothing; another one is a conflict, and the first stands."""
    run = open_run(project)
    request = post_until_asked(project, run)
    answer(project, run, request, -3.0)
    before = project.load_rows(tables.eval_requests, run)
    assert answer(project, run, request, -3.0).duplicates == 1
    assert answer(project, run, request, 2.0).conflicts[0].stored_value == -3.0
    assert project.load_rows(tables.eval_requests, run) == before


def test_an_answer_to_an_earlier_attempt_is_refused(project: ProjectFixture) -> None:
    """A run that has resumed is another: what was asked of the attempt before is moot, and no longer listed."""
    run = open_run(project)
    request = post_until_asked(project, run)
    with project.database.reading() as tx:
        assert [item.id for item in eval_requests.list_open_requests(tx, project.id, [run.id], NOW, 9)] == [request.id]
        assert eval_requests.list_open_requests(tx, project.id, [], NOW + OPEN_FOR, 9) == []
    project.submit(run, Resumed(10))
    with project.database.reading() as tx:
        assert eval_requests.list_open_requests(tx, project.id, [run.id], NOW, 9) == []
    with pytest.raises(Conflict, match="attempt 1"):
        answer(project, run, request, -3.0)


def test_a_process_that_does_not_know_the_run_tells_the_open_request(project: ProjectFixture) -> None:
    """Another process reads it from its row, and so does this one once it has forgotten the run."""
    run = open_run(project)
    request = post_until_asked(project, run)
    project.evict_run(run)
    receipt = project.post_observations(run, evals(SCORES[request.step + 1], start=request.step + 1))
    assert receipt.eval_request == request


def test_an_answer_alone_may_stop_a_run(project: ProjectFixture) -> None:
    """Its verdict becomes a decision in the same transaction."""
    eager = {
        "name": "eager",
        "members": [{"detector": "posterior", "stop_at": 0.5, "suspect_at": 0.2}],
        "evaluate_now": {},
    }
    with project.database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, project.id), "eager", eager, NOW)
    run = project.open_run(policy="eager", total_steps=90, eval_share=0.0)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    request = post_until_asked(project, run)
    assert project.find_decision(run) is None
    stopped = answer(project, run, request, -2.0)
    assert stopped.run.verdict.verdict == "stop"
    assert stopped.decision is not None
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_a_name_of_answers_is_no_new_metric(project: ProjectFixture) -> None:
    """Roles that are recognized by name are not told anew by an answer."""
    run = project.open_run(uuid.uuid4().hex, policy="early", recognise=True, eval_share=0.0, total_steps=90)
    project.submit(run, CheckpointSaved(30, "file:///30"))
    request = None
    for at, score in enumerate(SCORES):
        request = (
            project.post_observations(run, [PostedObservation("eval/accuracy", at, score)]).eval_request or request
        )
    assert request is not None
    assert PAIRED_METRIC not in answer(project, run, request, -1.0).run.metrics

"""Decisions, and telling of them and of whatever else changed: rows in the transaction of what caused them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from evalstop_detectors import Verdict, verdict_to_document

from evalstop_service import events, lifecycle
from evalstop_service.ingest.live import LiveRun
from evalstop_service.ingest.work import Work
from evalstop_service.store import decisions, outbox, projects, verdicts
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run


def decide(work: Work, live: LiveRun, verdict: Verdict) -> None:
    """Put the first verdict that calls for a stop on record, and have it carried out unless it is a shadow's."""
    tx, run = work.tx, live.run
    assert verdict.step is not None, "a verdict to stop has a step"
    project = projects.get(tx, run.project_id)
    state = lifecycle.opening(lifecycle.Mode(run.mode), project.grace_seconds)
    decision = Decision(
        id=new_id(),
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        state=state,
        step=verdict.step,
        verdict=run.verdict,
        best_checkpoint=run.best_checkpoint,
        policy_id=run.policy_id,
        due_at=work.now + timedelta(seconds=project.grace_seconds),
        created_at=work.now,
        run_name=run.name,
        policy_name=run.policy_name,
        policy_version=run.policy_version,
    )
    decisions.add(tx, decision, f"policy {run.policy_name} version {run.policy_version}", work.now)
    work.decided(live, decision)
    if state is not lifecycle.State.SHADOW:
        outbox.announce(
            tx,
            project_id=run.project_id,
            run_id=run.id,
            type="run.stop_requested",
            data=events.data(project, run, replace(decision, state=lifecycle.State.REQUESTED)),
            now=work.now,
            due_at=decision.due_at,
            decision_id=decision.id,
        )


def announce(work: Work, before: Run, run: Run, reached: Sequence[Verdict]) -> None:
    """Record the changes of verdict on the way, and tell of a first suspicion and of a moved pointer."""
    tx, news = work.tx, []
    word = before.verdict["verdict"]
    for verdict in reached:
        if verdict.verdict != word:
            word = verdict.verdict
            if word == "suspect" and not verdicts.reached(tx, run.id, run.attempt, "suspect"):
                news.append("run.suspected")
            verdicts.add(tx, run.id, run.attempt, verdict_to_document(verdict), work.now)
    if _place(run) != _place(before):
        news.append("run.best_checkpoint_changed")
    if news:
        project = projects.get(tx, run.project_id)
        for event_type in news:
            data = events.data(project, run, None)
            outbox.announce(tx, project_id=project.id, run_id=run.id, type=event_type, data=data, now=work.now)


def _place(run: Run) -> tuple[int, str] | None:
    """The checkpoint pointed at: its smoothed score may change with every eval, which is no news."""
    best = run.best_checkpoint
    return (best["step"], best["uri"]) if best else None

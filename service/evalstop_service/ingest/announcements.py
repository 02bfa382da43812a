"""Decisions, and telling of them and of whatever else changed: rows in the transaction of what caused them."""

from __future__ import annotations

from collections.abc import Sequence

from evalstop_detectors import Verdict, verdict_to_document

from evalstop_service.decisions import transitions
from evalstop_service.ingest.run_cache import LiveRun
from evalstop_service.ingest.unit_of_work import Work
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.event_types import EventType
from evalstop_service.store import decisions, projects, verdicts
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events


def decide(work: Work, live: LiveRun, verdict: Verdict) -> None:
    """Put the first verdict that calls for a stop on record, and have it carried out unless it is let run."""
    assert verdict.step is not None, "a verdict to stop has a step"
    work.write()  # the guards look at what was observed
    work.decided(live, transitions.create_decision(work.tx, live.run, verdict.step, work.now))


def reconsider(work: Work, live: LiveRun) -> None:
    """Look again at what speaks against a stop that is on hold: there is a new eval, or a checkpoint."""
    decision = work.decision(live)
    if decision is not None and decision.state == DecisionState.ON_HOLD:
        work.write()  # the guards look at what was observed
        locked = decisions.lock_decision(work.tx, decision)
        work.decided(live, transitions.recheck_guards(work.tx, live.run, locked, work.now))


def is_news(before: Run, run: Run, reached: Sequence[Verdict]) -> bool:
    """Whether anything that happened to a run is to be recorded or told."""
    return any(verdict.verdict != before.verdict["verdict"] for verdict in reached) or _place(run) != _place(before)


def announce(work: Work, before: Run, run: Run, reached: Sequence[Verdict]) -> None:
    """Record the changes of verdict on the way, and tell of a first suspicion and of a moved pointer.

    A suspicion without evidence from gold asks for an eval, which alone can tell what it is worth.
    """
    news = []
    word = before.verdict["verdict"]
    for verdict in reached:
        if verdict.verdict != word:
            word = verdict.verdict
            if word == "suspect" and not verdicts.has_reached(work.tx, run.id, run.attempt, "suspect"):
                news.append(EventType.SUSPECTED)
                if not verdict.rests_on_eval:
                    news.append(EventType.EVAL_REQUESTED)
            verdicts.add_verdict(work.tx, run.id, run.attempt, verdict_to_document(verdict), work.now)
    if _place(run) != _place(before):
        news.append(EventType.BEST_CHECKPOINT_CHANGED)
    if news:
        project = projects.get_project(work.tx, run.project_id)
        for event_type in news:
            events.announce_run_event(work.tx, event_type, project, run, work.now)


def _place(run: Run) -> tuple[int, str] | None:
    """The checkpoint pointed at: its smoothed score may change with every eval, which is no news."""
    best = run.best_checkpoint
    return (best["step"], best["uri"]) if best else None

"""Labels by people who do not see what was decided: which cases they get, and what their label says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from evalstop_service.domain import outcome
from evalstop_service.domain.outcome import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.errors import Invalid
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions, outcomes, runs
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.outcomes import Outcome
from evalstop_service.store.runs import Run

MOST_CASES = 40
_EXAMINED = 3 * MOST_CASES


@dataclass(frozen=True)
class LabeledCase:
    """A run to be labeled, its decision if it was flagged, and its recorded outcomes, oldest first."""

    run: Run
    decision: Decision | None
    outcomes: Sequence[Outcome]

    @property
    def labels(self) -> dict[str, RunOutcome]:
        """The last label of each person, by name."""
        flagged = self.decision is not None
        return {
            recorded.actor: outcome.read_run_outcome(recorded.outcome, recorded.turn_step, flagged=flagged)
            for recorded in self.outcomes
            if not recorded.derived
        }

    @property
    def derived(self) -> Outcome | None:
        """The outcome derived from its later evals, if recorded."""
        return next((recorded for recorded in reversed(self.outcomes) if recorded.derived), None)


def choose_cases(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> list[LabeledCase]:
    """Up to `MOST_CASES` of the newest cases that can be judged from their curve: half of them stops that were not
    carried out, half never flagged, in an order that does not reveal which. The same for everybody with the same
    filter."""
    flagged = _list_curves(tx, project_id, replace(case_filter, treatment=Treatment.OBSERVED))
    passed = _list_curves(tx, project_id, replace(case_filter, flagged=False))
    number = min(len(flagged), max(MOST_CASES // 2, MOST_CASES - len(passed)))
    chosen = flagged[:number] + passed[: MOST_CASES - number]
    history = outcomes.load_history(tx, [(run.id, run.attempt) for run, _ in chosen])
    # The last bytes of an id are random and never change.
    ordered = sorted(chosen, key=lambda item: item[0].id.bytes[::-1])
    return [LabeledCase(run, decision, history.get((run.id, run.attempt), ())) for run, decision in ordered]


def judge_outcome(run_outcome: RunOutcome, turn_step: int | None, decision: Decision | None) -> DecisionOutcome:
    """Whether the decision was right, given a person's label of the run; raises Invalid for a contradiction."""
    if turn_step is not None and run_outcome is not RunOutcome.TURNED:
        raise Invalid("only a run that turned has a turn_step: leave it empty, or label the run turned")
    turn = None if turn_step is None else Turn(turn_step, turn_step)
    return outcome.judge_decision(run_outcome, None if decision is None else decision.step, turn)


def _list_curves(tx: Transaction, project_id: UUID, case_filter: CaseFilter) -> list[tuple[Run, Decision | None]]:
    """The runs of the newest cases that can show their whole last attempt, with its decision."""
    listed = cases.list_cases(tx, project_id, case_filter, limit=_EXAMINED)
    present = runs.load_runs(tx, [case.run_id for case in listed])
    decided = decisions.load_decisions(tx, present)
    curves = []
    for case in listed:
        run, decision = present.get(case.run_id), decided.get(case.run_id)
        if run is None or (case.decision_id is not None and decision is None):
            continue  # its row or its decision cannot be read
        whole = run.attempt == case.attempt and run.pruned_at is None and run.last_step is not None
        ordered = decision is not None and decision.ordered
        if whole and not ordered and watched_metrics.find_eval_metric(run) is not None:
            curves.append((run, decision))
    return curves

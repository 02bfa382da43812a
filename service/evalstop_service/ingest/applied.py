"""The result of messages that were applied to a run."""

from __future__ import annotations

import msgspec
from evalstop_detectors import find_request

from evalstop_service.ingest.combined_evals import NO_SCORES, NewScores
from evalstop_service.ingest.messages import Answer, Content
from evalstop_service.ingest.run_state import RunState
from evalstop_service.rules.run_results import Call
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run


class Applied(msgspec.Struct):
    """Messages applied to a run: what to save, and the answers to give once it is saved.

    `points`: new ones, of which `late` are not past the last step of their metric. `content`: of the last message, if
    it has consequences: rows other than the run's and the observations', see `ingest.consequences`. `decision`: on the
    current attempt, as far as it was loaded. `settles_case`: evals or checkpoints arrived after the run's end.
    `scores`: of several combined evals, where stored scores are replaced.
    """

    before: RunState
    state: RunState
    answers: list[Answer]
    points: list[PostedObservation] = []
    late: list[PostedObservation] = []
    content: Content | None = None
    decision: Decision | None = None
    settles_case: bool = False
    scores: NewScores = NO_SCORES

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to save."""
        return self.state.run is not self.before.run

    @property
    def fails(self) -> bool:
        """Whether the run is no longer judged from here on."""
        return self.state.run.detector_failure is not None and self.before.run.detector_failure is None


def has_consequences(before: RunState, state: RunState) -> bool:
    """Whether more has to be saved than new observations and the columns of the hot statement."""
    run, old = state.run, before.run
    return (
        run.rewritten_version != old.rewritten_version
        or bool(state.unrecorded and any(Call(item.verdict) is not old.verdict.verdict for item in state.unrecorded))
        or (state.monitor.verdict.stops and not state.has_decision and run.status == RunStatus.RUNNING)
        or (run.best_checkpoint is not old.best_checkpoint and place_of(run) != place_of(old))
        or state.keeps_monitor
        or run.status != old.status
        or run.recognition is not old.recognition
        or run.detector_failure != old.detector_failure
        or (
            bool(state.policy.asking or before.policy.asking)
            and find_request(state.policy, state.monitor) != find_request(before.policy, before.monitor)
        )
    )


def place_of(run: Run) -> tuple[int, str] | None:
    """The step and address of the best checkpoint. Its smoothed score is left out: it changes with every eval."""
    best = run.best_checkpoint
    return (best.step, best.uri) if best else None

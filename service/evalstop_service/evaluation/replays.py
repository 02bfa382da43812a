"""Replays a policy on one run, from its observations, by the same `advance` that judged the run while it ran."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_detectors import DetectorError, Evidence, Policy, Verdict, advance, start

from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replay:
    """What a policy says of a run: each verdict that changed the call, and the final verdict.

    `evidence`: of each member at the end. `observations`: the number that the policy watches.
    """

    verdicts: Sequence[Verdict]
    evidence: Sequence[Evidence | None]
    observations: Sequence[PostedObservation]


def replay_run(tx: Transaction, run: Run, policy: Policy) -> Replay:
    """Replay a run under a policy; raises DetectorError if a detector rejects the observations or fails on them."""
    policy = restrict_policy(policy, run)
    watched = WatchedMetrics(run, policy)
    series = observations.load_series(tx, run.id, watched.metrics)
    try:
        monitor, verdicts = advance(policy, start(policy), watched.observations(series))
    except DetectorError:
        raise
    except Exception as error:  # observations are stored although a detector fails on them
        _log.exception("a detector failed in a replay of run %s (%s)", run.id, run.name)
        raise DetectorError(f"a detector failed: {error!r:.200}") from error
    return Replay(verdicts, monitor.evidence, series)

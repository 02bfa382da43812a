"""The truth about jobs, hidden from schedulers and rules: the oracle knows it, and metrics judge schedules by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.stopping import Stops


def stop_at_peaks(workload: Workload, hidden: Hidden) -> tuple[Stops, Floats]:
    """The stops of the oracle, and the hours after which each job ends: exactly at the peak, between two evals.

    `Stops.after` is the first eval after the peak; the kept checkpoint is the best one.
    """
    evals = hidden.eval_scores.shape[1]
    after = np.where(hidden.hacking, np.ceil(hidden.peaks * evals), 0).astype(np.int64)
    kept_evals = hidden.eval_scores.argmax(axis=1) + 1
    return Stops(after, kept_evals), workload.hours * hidden.peaks


@dataclass(frozen=True, eq=False)
class Hidden:
    """The truth, by job.

    `peaks`: the share of its steps, and of its hours, at which the eval score is highest; 1 for healthy jobs.
    `eval_scores`: noiseless, at each eval. `best`: the highest noiseless eval score at any time.
    """

    hacking: NDArray[np.bool_]
    peaks: Floats
    eval_scores: Floats
    best: Floats
    gain: float

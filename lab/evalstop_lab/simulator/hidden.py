"""The truth about jobs, hidden from schedulers and rules: the oracle knows it, and metrics judge schedules by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.stopping import Stops


def at_the_peak(workload: Workload, hidden: Hidden) -> tuple[Stops, Floats]:
    """The stops of the oracle, and after how many hours each job ends: at the peak itself, between two evals.

    The checkpoint that it keeps is the best of the evals before, the stop counted from the first eval after.
    """
    evals = hidden.eval_scores.shape[1]
    after = np.where(hidden.hacking, np.ceil(hidden.peaks * evals), 0).astype(np.int64)
    kept = hidden.eval_scores.argmax(axis=1) + 1
    return Stops(after, kept), workload.hours * np.where(hidden.hacking, hidden.peak_hours, 1.0)


@dataclass(frozen=True, eq=False)
class Hidden:
    """By job: whether it is hacking, at which share of its steps the eval score is highest, and the noiseless eval
    score at each eval.

    `peak_hours` is the share of its hours at which that is: less than of its steps where responses grow longer after
    the peak. `best` is the highest noiseless eval score at any time. Of healthy jobs the peak is the end.
    """

    hacking: NDArray[np.bool_]
    peaks: Floats
    peak_hours: Floats
    eval_scores: Floats
    best: Floats
    gain: float

"""The upper bound: a rule that knows the truth and stops every hacking job at its peak, and no other."""

from __future__ import annotations

import numpy as np

from evalstop_lab.simulator.hidden import Hidden
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

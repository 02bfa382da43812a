"""What is true of jobs and no scheduler or rule may know; metrics hold schedules against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator.jobs import Floats


@dataclass(frozen=True, eq=False)
class Hidden:
    """By job: whether it is hacking, at which share of its steps the eval score is highest, and noiseless the eval
    score at each eval.

    `peak_hours` is the share of its hours at which that is: less than of its steps where responses grow longer after
    the peak. `best` is the highest noiseless the eval score at any time. Of healthy jobs the peak is the end.
    """

    hacking: NDArray[np.bool_]
    peaks: Floats
    peak_hours: Floats
    eval_scores: Floats
    best: Floats
    gain: float

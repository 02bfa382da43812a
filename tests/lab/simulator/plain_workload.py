"""Jobs whose evals do not matter, to compare the engine with queueing theory."""

from __future__ import annotations

import numpy as np
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload


def build_plain_workload(submitted: Floats, gpus: Integers, hours: Floats, estimates: Floats | None = None) -> Workload:
    """Jobs with a single eval of 0 at the end."""
    columns = (submitted.tolist(), gpus.tolist(), hours.tolist(), (hours if estimates is None else estimates).tolist())
    jobs = tuple(
        Job(number, Kind.LORA, at, size, length, estimate, evals=1)
        for number, (at, size, length, estimate) in enumerate(zip(*columns, strict=True))
    )
    zeros = np.zeros((len(jobs), 1))
    return Workload(jobs, zeros, zeros)

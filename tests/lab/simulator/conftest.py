"""What the tests of the simulator share: small clusters, and jobs of any shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from evalstop_lab.simulator.engine import Schedule
from evalstop_lab.simulator.jobs import Workload, plain
from evalstop_lab.simulator.setting import PAPER, Setting
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)

SMALL: Setting = replace(PAPER, jobs=80, measured=(0.0, 1.0))


@st.composite
def workloads(draw: st.DrawFn, most_gpus: int = 8) -> Workload:
    """Up to forty jobs; times lie on a coarse grid, so that much happens in one instant."""
    count = draw(st.integers(1, 40))
    times = st.integers(0, 60).map(lambda quarter: quarter / 4)
    lengths = st.integers(1, 40).map(lambda quarter: quarter / 4)
    submitted = np.sort(draw(st.lists(times, min_size=count, max_size=count)))
    gpus = draw(st.lists(st.integers(1, most_gpus), min_size=count, max_size=count))
    hours, estimates = (draw(st.lists(lengths, min_size=count, max_size=count)) for _ in range(2))
    return plain(submitted.astype(float), np.array(gpus), np.array(hours), np.array(estimates))


def assert_no_gpu_is_given_out_twice(workload: Workload, schedule: Schedule, gpus: int) -> None:
    """At no time do the gangs that run hold more GPUs than there are."""
    edges = [
        (time, kind, workload.jobs[job].gpus) for job, *spell in schedule.spells for kind, time in enumerate(spell)
    ]
    used = 0
    for _, kind, gang in sorted(edges, key=lambda item: (item[0], -item[1])):
        used += gang if kind == 0 else -gang
        assert 0 <= used <= gpus

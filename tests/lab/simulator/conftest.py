"""Fixtures of the simulator's tests: a small setting and a Hypothesis strategy for workloads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from evalstop_lab.simulator.drawing import PAPER, Setting
from evalstop_lab.simulator.engine import Schedule
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

property_settings = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)

SMALL: Setting = replace(PAPER, jobs=80, measured=(0.0, 1.0))


@st.composite
def workloads(draw: st.DrawFn, most_gpus: int = 8) -> Workload:
    """Up to 40 jobs; times are on a coarse grid, so that many events coincide."""
    count = draw(st.integers(1, 40))
    times = st.integers(0, 60).map(lambda quarter: quarter / 4)
    lengths = st.integers(1, 40).map(lambda quarter: quarter / 4)
    submitted = np.sort(draw(st.lists(times, min_size=count, max_size=count)))
    gpus = draw(st.lists(st.integers(1, most_gpus), min_size=count, max_size=count))
    hours, estimates = (draw(st.lists(lengths, min_size=count, max_size=count)) for _ in range(2))
    return build_plain_workload(submitted.astype(float), np.array(gpus), np.array(hours), np.array(estimates))


def assert_no_gpu_is_allocated_twice(workload: Workload, schedule: Schedule, gpus: int) -> None:
    """Running gangs never hold more GPUs than the cluster has."""
    spells = [spell for spell in schedule.spells if spell[1] < spell[2]]  # rounding may leave one of no length
    edges = [(time, kind, workload.jobs[job].gpus) for job, *spell in spells for kind, time in enumerate(spell)]
    used = 0
    for _, kind, gang in sorted(edges, key=lambda item: (item[0], -item[1])):
        used += gang if kind == 0 else -gang
        assert 0 <= used <= gpus


def build_plain_workload(submitted: Floats, gpus: Integers, hours: Floats, estimates: Floats | None = None) -> Workload:
    """Jobs with a single eval of 0 at the end."""
    columns = (submitted.tolist(), gpus.tolist(), hours.tolist(), (hours if estimates is None else estimates).tolist())
    jobs = tuple(
        Job(number, Kind.LORA, at, size, length, estimate, evals=1)
        for number, (at, size, length, estimate) in enumerate(zip(*columns, strict=True))
    )
    zeros = np.zeros((len(jobs), 1))
    return Workload(jobs, zeros, zeros)

"""What GPU-hours cost: by the hour on whole nodes, by the month, or nothing more because they are owned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalstop_lab.simulator.engine import Schedule
from evalstop_lab.simulator.jobs import Workload

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU-hour. Reserved GPUs are paid for whether they are used or not; nodes are rented whole."""

    on_demand: float = 4.0
    spot: float = 1.6
    reserved: float = 2.4
    node_gpus: int = 8


def billed_gpu_hours(workload: Workload, schedule: Schedule, node_gpus: int) -> float:
    """GPU-hours of the nodes that are up: at each time as many as the GPUs in use need, packed as well as can be."""
    if not schedule.spells:
        return 0.0
    job, since, until = zip(*schedule.spells, strict=True)
    gpus = workload.gpus[list(job)]
    times = np.concatenate([since, until])
    order = np.argsort(times, kind="stable")
    used = np.cumsum(np.concatenate([gpus, -gpus])[order])[:-1]
    return float((np.ceil(used / node_gpus) * node_gpus * np.diff(times[order])).sum())


def dollars_a_month(prices: Prices, returned_gpu_hours: float, given_up_gpus: int) -> dict[str, float]:
    """What comes back a month, by how the GPUs are paid for.

    By the hour it is the hours; of reserved GPUs only those that can be given up, in whole nodes; of owned ones
    nothing, since they are paid for: there only the waiting gets shorter.
    """
    nodes = given_up_gpus // prices.node_gpus * prices.node_gpus
    return {
        "on demand": returned_gpu_hours * prices.on_demand,
        "spot": returned_gpu_hours * prices.spot,
        "reserved": nodes * HOURS_A_MONTH * prices.reserved,
        "owned": 0.0,
    }

"""The parameters of a simulated cluster: its jobs, their eval scores, and the noise of evals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from evalstop_lab.simulator.engine import Cluster
from evalstop_lab.simulator.jobs import Kind

Sizes = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Offered:
    """Jobs of one kind: their share of all jobs, the median of their hours, and the shares of gang sizes."""

    share: float
    median_hours: float
    sizes: Sizes


OFFERED: Mapping[Kind, Offered] = MappingProxyType(
    {
        Kind.RLHF: Offered(0.8, 6.0, ((2, 0.2), (4, 0.4), (8, 0.3), (16, 0.1))),
        Kind.DPO: Offered(0.1, 3.0, ((2, 0.4), (4, 0.4), (8, 0.2))),
        Kind.LORA: Offered(0.1, 1.5, ((1, 0.5), (2, 0.3), (4, 0.2))),
    }
)


@dataclass(frozen=True)
class Setting:
    """A world from which jobs are drawn; shares are between 0 and 1.

    `load`: the ratio of requested to available GPU-hours. `duration_sd`, `estimate_sd`: of the
    logarithm. `hacking_share`: of the RLHF jobs. `peaks`: the range of peaks of hacking jobs, as shares of their plans.
    `drop`: the fall of the eval score from its peak to the end of the plan, as a share of its gain. `healthy_rate`: the
    rate at which a healthy eval score saturates, per plan. `noise_sd`: of one eval, on the scale of the eval
    score, which rises from `start` by `gain`. `measured`: the range of jobs, by submission, whose times are reported,
    without the start, when the cluster is empty, and the end, when no more jobs arrive.
    """

    jobs: int = 1500
    gpus: int = 64
    load: float = 0.86
    offered: Mapping[Kind, Offered] = field(default_factory=lambda: OFFERED)
    duration_sd: float = 0.8
    estimate_sd: float = 0.4
    hacking_share: float = 0.5
    peaks: tuple[float, float] = (0.5, 0.7)
    drop: float = 0.7
    healthy_rate: float = 3.5
    evals: int = 10
    noise_sd: float = 0.03
    gain: float = 0.6
    start: float = 0.2
    loss_noise: float = 0.05
    restore_hours: float = 0.1
    measured: tuple[float, float] = (0.2, 0.9)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.gpus, self.restore_hours)


PAPER = Setting()

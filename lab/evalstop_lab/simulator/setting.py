"""The numbers of a drawn cluster: who submits what, how the eval score moves, how noisy evals are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from evalstop_lab.simulator.jobs import Kind

Sizes = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Offered:
    """What jobs of a kind ask for: their share of all jobs, the median of their hours, and gang sizes by share."""

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
    """A world to draw jobs from; shares are between 0 and 1.

    `load`: GPU-hours asked for, evals apart, to GPU-hours there are. `duration_sd`, `estimate_sd`: of the logarithm.
    `hacking_share`: of the RLHF jobs. `peaks`: between which shares of its plan a hacking job turns. `curve`: a name in
    `curves.HACKING`. `drop`: what the eval score loses from its peak to the end of the plan, as a share of its gain,
    where the curve does not say. `healthy_rate`: how fast a healthy eval score saturates, per plan.
    `healthy_dip_prob`: the share of healthy jobs with a dip that recovers. `noise_sd`: of one eval, on the scale of the
    eval score, which goes from `start` up by `gain`. `eval_share`: what one eval costs, as a share of the job's hours.
    `length_growth`: by how much the responses of a hacking job, and with them its iterations, have grown from its peak
    to the end of its plan (length hacking). `measured`: between which shares of its
    jobs, by submission, times are reported, so that the cluster has filled up and jobs go on coming.
    """

    jobs: int = 1500
    gpus: int = 64
    load: float = 0.86
    tenants: int = 8
    offered: Mapping[Kind, Offered] = field(default_factory=lambda: OFFERED)
    duration_sd: float = 0.8
    estimate_sd: float = 0.4
    hacking_share: float = 0.5
    peaks: tuple[float, float] = (0.5, 0.7)
    curve: str = "tent"
    drop: float = 0.7
    healthy_rate: float = 3.5
    healthy_dip_prob: float = 0.0
    evals: int = 10
    eval_share: float = 0.0
    length_growth: float = 0.0
    noise_sd: float = 0.03
    gain: float = 0.6
    start: float = 0.2
    loss_noise: float = 0.05
    restore_hours: float = 0.1
    stop_hours: float = 0.0
    measured: tuple[float, float] = (0.2, 0.9)


PAPER = Setting()

WORLDS: Mapping[str, Setting] = MappingProxyType(
    {
        "paper": PAPER,
        "gao": replace(PAPER, curve="gao_rl"),
        "spread peaks": replace(PAPER, peaks=(0.3, 0.8)),
        "20 evals": replace(PAPER, evals=20),
        "50 evals": replace(PAPER, evals=50),
        "noise .1": replace(PAPER, noise_sd=0.1, evals=50),
        "dips": replace(PAPER, healthy_dip_prob=0.4, evals=50),
        "hard": replace(PAPER, curve="gao_rl", peaks=(0.3, 0.8), evals=50, noise_sd=0.05, healthy_dip_prob=0.2),
    }
)

_GANGS = replace(
    PAPER,
    jobs=600,
    gpus=16,
    load=0.8,
    offered=MappingProxyType({Kind.RLHF: Offered(1.0, 6.0, ((1, 1.0),))}),
    peaks=(0.3, 0.8),
    evals=50,
    noise_sd=0.05,
)

GANGS: Mapping[str, Setting] = MappingProxyType(
    {"gangs": _GANGS, "gangs, dips": replace(_GANGS, healthy_dip_prob=0.25)}
)
"""Jobs that are gangs of one size, on a cluster with room for sixteen; with dips in a quarter of the healthy ones."""

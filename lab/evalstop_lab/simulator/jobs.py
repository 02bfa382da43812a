"""The jobs of a cluster, as visible to schedulers and stopping rules. All times are in hours.

The truth about a job (whether it is hacking, where its eval score peaks) is in `drawing.Hidden`, which neither the
engine nor a scheduler may import.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Kind(StrEnum):
    """What a job trains."""

    RLHF = "rlhf"
    DPO = "dpo"
    LORA = "lora"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One job, which runs on all of its `gpus` or not at all (a gang).

    `hours`: its duration without a stop, including evals; only the engine and schedulers that are declared to know it
    may use it. `estimate_hours`: the user's estimate. Evals come after equal numbers of steps, the last one at the end.
    `losses`: the training loss at each eval.
    """

    number: int
    kind: Kind
    submitted: float
    gpus: int
    hours: float
    estimate_hours: float
    evals: int
    losses: tuple[float, ...] = ()

    def eval_at(self, count: int) -> float:
        """The hours of running after which eval number `count`, from 1, is known."""
        # The share of the last eval is 1, so that it comes exactly at `hours`.
        return self.hours * (count / self.evals)

    def evals_after(self, ran: float) -> int:
        """The number of evals that are known after `ran` hours of running."""
        return min(int(ran / self.hours * self.evals), self.evals)


@dataclass(frozen=True, eq=False)
class Workload:
    """Jobs in order of submission, and the metrics that their trainers post.

    `eval_scores`, `proxy`: a row per job and a column per eval.
    """

    jobs: tuple[Job, ...]
    eval_scores: Floats
    proxy: Floats

    @property
    def gpus(self) -> Integers:
        return np.array([job.gpus for job in self.jobs], dtype=np.int64)

    @property
    def hours(self) -> Floats:
        return np.array([job.hours for job in self.jobs])

    @property
    def submitted(self) -> Floats:
        return np.array([job.submitted for job in self.jobs])

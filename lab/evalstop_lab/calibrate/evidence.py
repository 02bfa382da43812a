"""The records that a detector's evidence set over a run, which are enough to evaluate every threshold at once.

A policy stops at the first evidence that reaches its threshold. The running maximum of the evidence reaches any
threshold at the same step, so one pass over a run is enough for all thresholds.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalstop_detectors import Detector, Kind, MetricRole, Observation

from evalstop_lab.replay import RequestedRoles, Run, jsonl, read_runs
from evalstop_lab.replay.lines import read_lines
from evalstop_lab.replay.sources import choose_reader, name_run

HEALTHY = "healthy"


def read_healthy_runs(
    paths: Sequence[Path], requested: RequestedRoles | None = None, total_steps: int | None = None
) -> dict[str, Run]:
    """The settled runs of these files by name, with this planned length if they report none; raises UnreadableInput
    with file and line.

    A run of JSON lines with a `label` other than "healthy" on any of its lines is left out.
    """
    runs = read_runs(paths, requested)
    runs.settle()
    left_out = {run for path in paths if choose_reader(path) is jsonl for run in _list_unhealthy(path)}
    for run in runs.by_name.values():
        run.total_steps = run.total_steps or total_steps
    return {name: run for name, run in runs.by_name.items() if name not in left_out}


def _list_unhealthy(path: Path) -> Iterator[str]:
    for _, line in read_lines(path):
        if '"label"' in line:
            row = json.loads(line)
            if row.get("label", HEALTHY) != HEALTHY:
                yield str(row.get("run", name_run(path)))


@dataclass(frozen=True)
class Records:
    """The strictly increasing values of the evidence that were the highest so far, and the `steps` at which each was
    reached.

    `kind` is None for a run without evidence. Evidence of the run's last step is ignored: stopping there saves nothing.
    """

    kind: Kind | None
    steps: tuple[int, ...]
    alarms: tuple[float, ...]

    @property
    def highest(self) -> float:
        """The most alarming evidence; minus infinity without any."""
        return self.alarms[-1] if self.alarms else -math.inf

    def first_at(self, alarm: float) -> int | None:
        """The step at which evidence first reached `alarm`."""
        index = bisect_left(self.alarms, alarm)
        return self.steps[index] if index < len(self.steps) else None


def record_evidence(detector: Detector[Any], observations: Iterable[Observation], last_step: int) -> Records:
    """Run the detector over a whole run, given in order; where the eval's measurement changes, it starts anew."""
    state, kind, eval_version = detector.start(), None, 0
    steps: list[int] = []
    alarms: list[float] = []
    for item in observations:
        if item.step >= last_step:
            break
        if item.role not in detector.roles:
            continue
        if item.eval_version != eval_version:
            eval_version = item.eval_version
            state = detector.start_anew(state) if MetricRole.EVAL in detector.roles else state
        state, evidence = detector.step(state, item)
        kind = evidence.kind
        if not alarms or evidence.value > alarms[-1]:
            steps.append(item.step)
            alarms.append(evidence.value)
    return Records(kind, tuple(steps), tuple(alarms))


def record_run(detector: Detector[Any], run: Run) -> Records:
    return record_evidence(detector, run.observations(), run.last_step)

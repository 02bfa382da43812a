"""Many logged runs through a policy at once, with the results of one by one: where the policy's detectors allow it.

Detectors of gold move eval by eval, and so do all runs here, in step. What they find calls for nothing most of the
time; where it does, the policy itself judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from evalstop_detectors import NOTHING_SEEN, Evidence, Kind, MetricRole, Observation, Policy, Verdict
from evalstop_detectors.checkpoint.noise import clipped
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.detectors.plateau_drop import PlateauDrop
from numpy.typing import NDArray

from evalstop_lab.replay.judged import Judged, judge, judged
from evalstop_lab.replay.plateau_columns import PlateauColumns
from evalstop_lab.replay.runs import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOGETHER = 1024
"""So many runs at once: enough for arrays to pay, and few enough to stay in the processor's cache."""

_FEW = 32


class Columns(Protocol):
    """A detector over many runs: `values` are their evidence, of which large ones alarm."""

    values: Floats

    def advance(self, index: int, runs: int) -> None:
        """Take in the eval of this index of the first `runs` runs."""

    def end(self, run: int) -> None:
        """Look no longer at this run, of which nothing more will be asked."""

    def evidence(self, run: int) -> Evidence:
        """What the detector would have said of this run last."""


def judge_together(policy: Policy, runs: Sequence[Run]) -> list[Judged]:
    """What `judge` makes of each of these settled runs."""
    fit = [index for index, run in enumerate(runs) if _fits(policy, run)] if can_judge(policy) else []
    found: dict[int, Judged] = {}
    if len(fit) >= _FEW:
        fit.sort(key=lambda index: -len(runs[index].series[MetricRole.EVAL].steps))
        for start in range(0, len(fit), TOGETHER):
            some = fit[start : start + TOGETHER]
            found.update(zip(some, _Together(policy, [runs[index] for index in some]).judge(), strict=True))
    return [found[index] if index in found else judge(policy, run) for index, run in enumerate(runs)]


def can_judge(policy: Policy) -> bool:
    """Whether runs can be judged side by side: by these detectors, and by a verdict that moves with evals alone."""
    return (
        policy.warmup_steps == 0
        and policy.min_evals <= _FEW
        and all(
            isinstance(member.detector, PlateauDrop | NonFinite)
            or (isinstance(member.detector, KDecline) and member.detector.role is MetricRole.EVAL)
            for member in policy.members
        )
    )


def _fits(policy: Policy, run: Run) -> bool:
    """Whether the run has evals, and nothing that is not finite."""
    return MetricRole.EVAL in run.series and all(
        np.isfinite(np.frombuffer(series.values)).all() for role, series in run.series.items() if role in policy.roles
    )


class _Together:
    """Some runs that fit, those with the most evals first."""

    def __init__(self, policy: Policy, runs: Sequence[Run]) -> None:
        self._policy, self._runs = policy, runs
        evals = [run.series[MetricRole.EVAL] for run in runs]
        self._counts = np.array([len(series.steps) for series in evals])
        shape = (int(self._counts.max()), len(runs))
        self._gold, self._stderrs = np.zeros(shape), np.full(shape, np.nan)
        self._steps = np.zeros(shape, dtype=np.int64)
        for column, (run, series) in enumerate(zip(runs, evals, strict=True)):
            count = len(series.steps)
            self._gold[:count, column] = run.roles.sign(MetricRole.EVAL) * np.frombuffer(series.values)
            self._stderrs[:count, column] = np.frombuffer(series.stderrs)
            self._steps[:count, column] = np.frombuffer(series.steps, dtype=np.int64)
        self._columns = [self._columns_of(member.detector) for member in policy.members]

    def judge(self) -> list[Judged]:
        found: dict[int, Judged] = {}
        suspect_steps: dict[int, int] = {}
        for index in range(len(self._gold)):
            runs = int(np.count_nonzero(self._counts > index))
            alarmed = np.zeros(runs, dtype=bool)
            for member, columns in zip(self._policy.members, self._columns, strict=True):
                if columns is None:
                    continue
                columns.advance(index, runs)
                for least in (member.thresholds.suspect_at, member.thresholds.stop_at):
                    if least is not None:
                        alarmed |= columns.values[:runs] >= least
            for run in np.flatnonzero(alarmed).tolist():
                if run in found:
                    continue
                step = int(self._steps[index, run])
                evidence = self._evidence(run, step)
                verdict = self._policy.judge(evidence, step, index + 1)
                if verdict.verdict != NOTHING_SEEN.verdict:
                    suspect_steps.setdefault(run, step)
                if verdict.stops:
                    found[run] = self._judged(run, verdict, evidence, suspect_steps)
                    for columns in filter(None, self._columns):
                        columns.end(run)
        for run in range(len(self._runs)):
            if run not in found:
                evidence = self._evidence(run, None)
                verdict = self._policy.judge(evidence, 0, int(self._counts[run]))
                found[run] = self._judged(run, verdict, evidence, suspect_steps)
        return [found[run] for run in range(len(self._runs))]

    def _judged(
        self, run: int, verdict: Verdict, evidence: Sequence[Evidence | None], suspect_steps: dict[int, int]
    ) -> Judged:
        return judged(self._policy, self._runs[run], verdict, evidence, suspect_steps.get(run))

    def _evidence(self, run: int, step: int | None) -> list[Evidence | None]:
        """By member, at the eval of this step or at the end of the run."""
        found: list[Evidence | None] = []
        for member, columns in zip(self._policy.members, self._columns, strict=True):
            if columns is not None:
                found.append(columns.evidence(run))
                continue
            (role,) = member.detector.roles
            series = self._runs[run].series.get(role)
            seen = series is not None and (step is None or series.steps[0] <= step)
            # Of finite values any one says what all do.
            quiet = member.detector.step(member.detector.start(), Observation(role, 0, 0.0))[1]
            found.append(quiet if seen else None)
        return found

    def _columns_of(self, detector: object) -> Columns | None:
        """None of a detector that finds nothing in finite values."""
        if isinstance(detector, KDecline):
            return _KDeclineColumns(detector, self._gold, self._steps)
        if not isinstance(detector, PlateauDrop):
            return None
        sums, counts = np.zeros(self._gold.shape), np.zeros(self._gold.shape, dtype=np.int64)
        if detector.use_proxy:
            for column, run in enumerate(self._runs):
                if MetricRole.PROXY in run.series:
                    steps = self._steps[: self._counts[column], column]
                    _add_proxies(run, steps, sums[:, column], counts[:, column])
        return PlateauColumns(detector, self._gold, self._stderrs, self._steps, sums, counts)


def _add_proxies(run: Run, steps: Integers, sums: Floats, counts: Integers) -> None:
    """Add each proxy, counted from the first, to what comes with the first eval at or after it."""
    series = run.series[MetricRole.PROXY]
    values = np.clip(run.roles.sign(MetricRole.PROXY) * np.frombuffer(series.values), clipped(-np.inf), clipped(np.inf))
    values = np.clip(values - values[0], clipped(-np.inf), clipped(np.inf))
    places = np.searchsorted(steps, np.frombuffer(series.steps, dtype=np.int64))
    inside = places < len(steps)
    np.add.at(sums, places[inside], values[inside])  # one after the other, as they come
    np.add.at(counts, places[inside], 1)


class _KDeclineColumns:
    """k_decline over many runs."""

    def __init__(self, detector: KDecline, gold: Floats, steps: Integers) -> None:
        self._detector, self._gold, self._steps = detector, gold, steps
        self.values = np.zeros(gold.shape[1])
        self._seen = np.zeros(gold.shape[1], dtype=np.int64)

    def advance(self, index: int, runs: int) -> None:
        self._seen[:runs] = index + 1
        declined = np.zeros(runs, dtype=bool)
        if index > 0 and index >= self._detector.warmup_evals:
            with np.errstate(over="ignore"):
                declined = self._gold[index, :runs] < self._gold[index - 1, :runs] - self._detector.min_delta
        self.values[:runs] = np.where(declined, self.values[:runs] + 1, 0.0)

    def end(self, run: int) -> None:
        """Counting costs next to nothing."""

    def evidence(self, run: int) -> Evidence:
        declines, seen, role = int(self.values[run]), int(self._seen[run]), self._detector.role
        if seen < self._detector.warmup_evals:
            note = f"warming up: {seen} of {self._detector.warmup_evals} values of {role} seen"
        else:
            note = f"{declines} consecutive declines of {role}, k = {self._detector.k}"
        turn_step = int(self._steps[seen - 1 - declines, run]) if declines else None
        return Evidence(Kind.COUNT, float(declines), turn_step, note)

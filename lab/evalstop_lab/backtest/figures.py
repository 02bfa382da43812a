"""The figures of a policy over all past runs, and its difference from another policy on the same runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome

from evalstop_lab.backtest.cases import Case, PolicyOutcome
from evalstop_lab.worlds.scoring import Figure, Share, clopper_pearson, estimate_mean, wilson


@dataclass(frozen=True)
class Summary:
    """A policy over all runs. Shares and means have 95 % intervals.

    `precision`: right stops among right and wrong ones. `false_stops`: wrong stops per healthy run. `caught`: right
    stops per turned run. `saved`, `cut`: the mean share of a run's steps that are saved by right stops, and lost by
    wrong ones. `gpu_hours`: the same in GPU-hours by outcome, over the runs with known costs.
    """

    policy: str
    stops: dict[DecisionOutcome, int]
    precision: Share
    false_stops: Share
    caught: Share
    saved: Figure
    cut: Figure
    gpu_hours: dict[DecisionOutcome, float]

    @property
    def stopped(self) -> int:
        return sum(self.stops.values())


@dataclass(frozen=True)
class Difference:
    """The first policy minus the second, run by run: means with 95 % intervals, in the units of `Summary`.

    `first_alone` and `second_alone`: the runs that only this policy would have stopped.
    """

    false_stops: Figure
    caught: Figure
    saved: Figure
    cut: Figure
    first_alone: int
    second_alone: int


def summarize_policy(cases: Sequence[Case], label: str) -> Summary:
    """Compute the figures of one policy."""
    healthy, turned = _select(cases, RunOutcome.HEALTHY), _select(cases, RunOutcome.TURNED)
    stops = {outcome: sum(_is_stop(case.passed[label], outcome) for case in cases) for outcome in DecisionOutcome}
    return Summary(
        label,
        stops,
        wilson(stops[DecisionOutcome.RIGHT], stops[DecisionOutcome.RIGHT] + stops[DecisionOutcome.WRONG]),
        clopper_pearson(sum(_is_stop(case.passed[label], DecisionOutcome.WRONG) for case in healthy), len(healthy)),
        wilson(sum(_is_stop(case.passed[label], DecisionOutcome.RIGHT) for case in turned), len(turned)),
        estimate_mean([_get_saved_share(case.passed[label], DecisionOutcome.RIGHT) for case in cases]),
        estimate_mean([_get_saved_share(case.passed[label], DecisionOutcome.WRONG) for case in cases]),
        {
            outcome: sum(case.passed[label].gpu_hours or 0.0 for case in cases if _is_stop(case.passed[label], outcome))
            for outcome in DecisionOutcome
        },
    )


def compare_policies(cases: Sequence[Case], first: str, second: str) -> Difference:
    """Compute the difference between two policies."""

    def estimate_difference(among: Sequence[Case], figure: Callable[[PolicyOutcome], float]) -> Figure:
        return estimate_mean([figure(case.passed[first]) - figure(case.passed[second]) for case in among])

    stopped = [(case.passed[first].stop_step is not None, case.passed[second].stop_step is not None) for case in cases]
    return Difference(
        estimate_difference(
            _select(cases, RunOutcome.HEALTHY), lambda item: float(_is_stop(item, DecisionOutcome.WRONG))
        ),
        estimate_difference(
            _select(cases, RunOutcome.TURNED), lambda item: float(_is_stop(item, DecisionOutcome.RIGHT))
        ),
        estimate_difference(cases, lambda item: _get_saved_share(item, DecisionOutcome.RIGHT)),
        estimate_difference(cases, lambda item: _get_saved_share(item, DecisionOutcome.WRONG)),
        sum(by_first and not by_second for by_first, by_second in stopped),
        sum(by_second and not by_first for by_first, by_second in stopped),
    )


def _select(cases: Sequence[Case], outcome: RunOutcome) -> list[Case]:
    return [case for case in cases if case.assessment.run_outcome is outcome]


def _is_stop(passed: PolicyOutcome, outcome: DecisionOutcome) -> bool:
    return passed.stop_step is not None and passed.outcome is outcome


def _get_saved_share(passed: PolicyOutcome, outcome: DecisionOutcome) -> float:
    return passed.saved if _is_stop(passed, outcome) else 0.0

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
    healthy, turned = _select(cases, RunOutcome.HEALTHY), _select(cases, RunOutcome.TURNED)
    results = [case.outcomes[label] for case in cases]

    def count_stops(among: Sequence[Case], outcome: DecisionOutcome) -> int:
        return sum(_is_stop(case.outcomes[label], outcome) for case in among)

    stops = {outcome: count_stops(cases, outcome) for outcome in DecisionOutcome}
    return Summary(
        label,
        stops,
        wilson(stops[DecisionOutcome.RIGHT], stops[DecisionOutcome.RIGHT] + stops[DecisionOutcome.WRONG]),
        clopper_pearson(count_stops(healthy, DecisionOutcome.WRONG), len(healthy)),
        wilson(count_stops(turned, DecisionOutcome.RIGHT), len(turned)),
        estimate_mean([_get_saved_share(result, DecisionOutcome.RIGHT) for result in results]),
        estimate_mean([_get_saved_share(result, DecisionOutcome.WRONG) for result in results]),
        {
            outcome: sum(result.gpu_hours or 0.0 for result in results if _is_stop(result, outcome))
            for outcome in DecisionOutcome
        },
    )


def compare_policies(cases: Sequence[Case], first: str, second: str) -> Difference:

    def estimate_difference(among: Sequence[Case], figure: Callable[[PolicyOutcome], float]) -> Figure:
        return estimate_mean([figure(case.outcomes[first]) - figure(case.outcomes[second]) for case in among])

    stopped = [tuple(case.outcomes[label].stop_step is not None for label in (first, second)) for case in cases]
    healthy, turned = _select(cases, RunOutcome.HEALTHY), _select(cases, RunOutcome.TURNED)
    return Difference(
        estimate_difference(healthy, lambda result: float(_is_stop(result, DecisionOutcome.WRONG))),
        estimate_difference(turned, lambda result: float(_is_stop(result, DecisionOutcome.RIGHT))),
        estimate_difference(cases, lambda result: _get_saved_share(result, DecisionOutcome.RIGHT)),
        estimate_difference(cases, lambda result: _get_saved_share(result, DecisionOutcome.WRONG)),
        stopped.count((True, False)),
        stopped.count((False, True)),
    )


def _select(cases: Sequence[Case], outcome: RunOutcome) -> list[Case]:
    return [case for case in cases if case.assessment.run_outcome is outcome]


def _is_stop(result: PolicyOutcome, outcome: DecisionOutcome) -> bool:
    return result.stop_step is not None and result.outcome is outcome


def _get_saved_share(result: PolicyOutcome, outcome: DecisionOutcome) -> float:
    return result.saved if _is_stop(result, outcome) else 0.0

"""Simulates many clusters, each drawn once, under every rule and scheduler, on all cores or on a Dask cluster.

The unit of work is one seed of one world: its jobs are drawn once, each rule decides once, and every scheduler runs
under each rule. So results depend neither on the number of workers nor on the other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evalstop_detectors import Policy

from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.hidden import Hidden, stop_at_peaks
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import Counts, Figures, count_flags, measure_schedule
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import decide_stops, no_stops

NONE, ORACLE = "none", "oracle"

CALIBRATION_SEED = 0
REPORTING_SEED = 30_000


@dataclass(frozen=True)
class Cell:
    """One seed of one world, and the policies and schedulers to simulate in addition to no stops and the oracle.
    `world`: the name of the world in the rows."""

    world: str
    setting: Setting
    seed: int
    policies: tuple[Policy, ...]
    schedulers: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """The result of one cell under one rule and one scheduler; the counts depend only on the rule."""

    world: str
    seed: int
    rule: str
    scheduler: str
    figures: Figures
    counts: Counts


def run_cell(cell: Cell) -> list[Row]:
    jobs = draw_jobs(cell.setting, cell.seed)
    return simulate_rules(cell.world, cell.setting, cell.seed, jobs, cell.policies, cell.schedulers)


def simulate_rules(
    world: str,
    setting: Setting,
    seed: int,
    jobs: tuple[Workload, Hidden],
    policies: Sequence[Policy],
    schedulers: Sequence[str],
) -> list[Row]:
    """Simulate these jobs under no stops, the oracle and each policy, by each scheduler."""
    workload, hidden = jobs
    cluster = setting.cluster
    unstopped = no_stops(workload)
    decided = {NONE: (unstopped, unstopped.ends(workload)), ORACLE: stop_at_peaks(workload, hidden)}
    for policy in policies:
        stops = decide_stops(policy, workload)
        decided[policy.name] = stops, stops.ends(workload)
    rows = []
    for rule, (stops, ends) in decided.items():
        counts = count_flags(workload, hidden, stops)
        for name in schedulers:
            schedule = simulate_cluster(workload, SCHEDULERS[name], cluster, ends)
            figures = measure_schedule(workload, hidden, stops, schedule, setting.measured)
            rows.append(Row(world, seed, rule, name, figures, counts))
    return rows


class Rows:
    """Rows by world, rule and scheduler, the seeds in order."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in sorted(rows, key=lambda item: item.seed):
            self._rows.setdefault((row.world, row.rule, row.scheduler), []).append(row)

    def figures(self, world: str, rule: str, scheduler: str) -> list[Figures]:
        return [row.figures for row in self._rows[world, rule, scheduler]]

    def numbers(self, world: str, rule: str, scheduler: str, figure: Callable[[Figures], float]) -> list[float]:
        """This figure, one value per seed."""
        return [figure(item) for item in self.figures(world, rule, scheduler)]

    def counts(self, world: str, rule: str) -> Counts:
        rows = next(rows for (of_world, by, _), rows in self._rows.items() if (of_world, by) == (world, rule))
        total = rows[0].counts
        for row in rows[1:]:
            total = total + row.counts
        return total


def build_cells(
    worlds: Mapping[str, Setting], seeds: Sequence[int], policies: Sequence[Policy], schedulers: Sequence[str]
) -> list[Cell]:
    """Every seed of every world, with these policies and schedulers."""
    return [
        Cell(name, setting, seed, tuple(policies), tuple(schedulers))
        for name, setting in worlds.items()
        for seed in seeds
    ]

"""`make bench-simulator`: events per second on one core, with stops decided in advance and at each eval.

Times are CPU times, the best of several rounds. Ignored events do not count. With stops in advance evals are not
events, so compare the two by jobs per second.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.report import new_table
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster, Schedule, simulate_cluster
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import PAPER
from evalstop_lab.simulator.stopping import RULES, add_stops, decide_stops

SEED = 40_000
TARGET_EVENTS_A_SECOND = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="make bench-simulator", description=__doc__)
    parser.add_argument("--cluster-jobs", type=positive_number, default=5000, help="number of jobs (%(default)s)")
    parser.add_argument(
        "--rounds", type=positive_number, default=5, help="rounds, of which the best counts (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    rows = measure_schedulers(options.cluster_jobs, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows, "python": platform.python_version()}) + "\n")
    else:
        Console().print(_build_table(rows))
    return 0


def measure_schedulers(jobs: int, rounds: int) -> list[dict[str, Any]]:
    """One row per scheduler: events and jobs per second in both modes, and whether their schedules are equal."""
    workload, _ = draw_jobs(replace(PAPER, jobs=jobs), SEED)
    cluster, policy = Cluster(PAPER.gpus, PAPER.restore_hours), RULES["paper"]
    ends = decide_stops(policy, workload).ends(workload, cluster)
    rows = []
    for name, scheduler in SCHEDULERS.items():
        ahead, ahead_seconds = _run_best(
            [partial(simulate_cluster, workload, scheduler, cluster, ends, evals=False)] * rounds
        )
        online, online_seconds = _run_best(
            [partial(simulate_cluster, workload, add_stops(scheduler, policy, workload), cluster)]
        )
        rows.append(
            {
                "scheduler": name,
                "events": ahead.events,
                "events_a_second": ahead.events / ahead_seconds,
                "jobs_a_second": jobs / ahead_seconds,
                "online_events_a_second": online.events / online_seconds,
                "online_jobs_a_second": jobs / online_seconds,
                "same": bool((ahead.ended == online.ended).all()),
            }
        )
    return rows


def _run_best(runs: Sequence[Callable[[], Schedule]]) -> tuple[Schedule, float]:
    """The schedule of the last run, and the smallest CPU time of a run."""
    least = math.inf
    for run in runs:
        started = time.process_time()
        schedule = run()
        least = min(least, time.process_time() - started)
    return schedule, least


def _build_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = f"events per second on one core; target with stops in advance: {TARGET_EVENTS_A_SECOND:,}"
    headings = ("scheduler", "events", "in advance", "", "jobs/s", "at each eval", "jobs/s", "same schedule")
    table = new_table(title, *headings)
    for row in rows:
        table.add_row(
            row["scheduler"],
            f"{row['events']:,}",
            f"{row['events_a_second']:,.0f}",
            "met" if row["events_a_second"] >= TARGET_EVENTS_A_SECOND else "missed",
            f"{row['jobs_a_second']:,.0f}",
            f"{row['online_events_a_second']:,.0f}",
            f"{row['online_jobs_a_second']:,.0f}",
            "yes" if row["same"] else "no",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())

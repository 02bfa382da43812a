"""`make bench-simulator`: events per second on one core, by scheduler.

Times are CPU times, the best of several rounds. Ignored events do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.report import new_table
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import PAPER
from evalstop_lab.simulator.stopping import RULES, decide_stops

SEED = 40_000
TARGET_EVENTS_A_SECOND = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
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
    """One row per scheduler: events and jobs per second."""
    workload, _ = draw_jobs(replace(PAPER, jobs=jobs), SEED)
    cluster, policy = PAPER.cluster, RULES["paper"]
    ends = decide_stops(policy, workload).ends(workload)
    rows = []
    for name, scheduler in SCHEDULERS.items():
        least = math.inf
        for _ in range(rounds):
            started = time.process_time()
            schedule = simulate_cluster(workload, scheduler, cluster, ends)
            least = min(least, time.process_time() - started)
        rows.append(
            {
                "scheduler": name,
                "events": schedule.events,
                "events_a_second": schedule.events / least,
                "jobs_a_second": jobs / least,
            }
        )
    return rows


def _build_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = f"events per second on one core; target: {TARGET_EVENTS_A_SECOND:,}"
    table = new_table(title, "scheduler", "events", "events/s", "", "jobs/s")
    for row in rows:
        table.add_row(
            row["scheduler"],
            f"{row['events']:,}",
            f"{row['events_a_second']:,.0f}",
            "met" if row["events_a_second"] >= TARGET_EVENTS_A_SECOND else "missed",
            f"{row['jobs_a_second']:,.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-simulator`: events per second of the cluster simulator on one core, by scheduler.

Times are CPU times, the best of several rounds. Ignored events do not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.report import new_table
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import simulate_cluster
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import PAPER
from evalstop_lab.simulator.stopping import RULES, decide_stops

SEED = 40_000
TARGET = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-simulator", description=__doc__)
    parser.add_argument("--cluster-jobs", type=positive_number, default=5000, help="number of jobs (%(default)s)")
    parser.add_argument("--rounds", type=positive_number, default=5, help="rounds, of which the best counts")
    options = parser.parse_args(arguments)
    workload, _ = draw_jobs(replace(PAPER, jobs=options.cluster_jobs), SEED)
    ends = decide_stops(RULES["paper"], workload).ends(workload)
    table = new_table(f"events per second on one core; target: {TARGET:,}", "scheduler", "events", "events/s", "jobs/s")
    for name, scheduler in SCHEDULERS.items():
        seconds = []
        for _ in range(options.rounds):
            started = time.process_time()
            schedule = simulate_cluster(workload, scheduler, PAPER.cluster, ends)
            seconds.append(time.process_time() - started)
        rates = (f"{count / min(seconds):,.0f}" for count in (schedule.events, options.cluster_jobs))
        table.add_row(name, f"{schedule.events:,}", *rates)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

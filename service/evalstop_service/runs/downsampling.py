"""Downsampling: long series are summarized while they grow, so that a page need not wait for their summaries.

    pass ──> running runs, a page at a time: which have grown by enough steps since the last pass?
      └────> each metric of those: summarize piece by piece, in one transaction each

A step has at most one observation that is not superseded, so a run whose last step has hardly moved has nothing new to
summarize. Any number of processes may do this: what one has summarized, the others skip.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from uuid import UUID

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.store import observations, projects, series
from evalstop_service.store.database import Database

EVERY_SECONDS = 10.0
RUNS_AT_A_TIME = 500

RESTS = 9
"""The pause after each piece, in multiples of its duration: this takes at most a tenth of a connection's time."""


def create_job(database: Database) -> PeriodicJob:
    """The periodic job that summarizes growing runs."""
    summarized: Mapping[UUID, int] = {}

    def summarize(pause: Wait) -> float:
        nonlocal summarized
        summarized = summarize_grown_runs(database, summarized, pause)
        return EVERY_SECONDS

    return PeriodicJob("summaries", summarize)


def summarize_grown_runs(
    database: Database, summarized: Mapping[UUID, int], pause: Wait = lambda _: False
) -> dict[UUID, int]:
    """Summarize what running runs observed since the last pass, until `pause` asks to stop.

    `summarized`: the last step of each long run at the last pass; returns the same for the next.
    """
    last_steps: dict[UUID, int] = {}
    enough = series.OBSERVATIONS_AT_A_TIME
    with database.reading() as tx:
        project_ids = [project.id for project in projects.list_projects(tx)]
    for project_id in project_ids:
        after: UUID | None = UUID(int=0)
        while after is not None:
            started = time.perf_counter()
            with database.reading() as tx:
                page = series.list_running_runs(tx, project_id, after, RUNS_AT_A_TIME)
                long = {run_id: last_step for run_id, last_step in page if last_step >= enough}
                # After a resume the last step may be lower than at the last pass.
                last_steps |= {run_id: min(summarized.get(run_id, 0), last_step) for run_id, last_step in long.items()}
                grown = [run_id for run_id, last_step in long.items() if last_step - last_steps[run_id] >= enough]
                metrics = observations.load_last_steps(tx, grown) if grown else {}
            if pause(RESTS * (time.perf_counter() - started)):
                return last_steps
            for run_id in grown:
                for metric in metrics[run_id]:
                    if series.catch_up_summaries(database, run_id, metric, lambda seconds: pause(RESTS * seconds)):
                        return last_steps
                last_steps[run_id] = long[run_id]
            after = page[-1][0] if len(page) == RUNS_AT_A_TIME else None
    return last_steps

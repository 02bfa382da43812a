"""Summaries of long series are made while these grow, so that whoever looks at one first need not wait for them.

    pass ──> running runs, a page at a time: which have grown by so many steps since they were looked at?
      └────> each metric of those: summarized piece by piece, with the run held for a piece     a piece, one transaction

At most one live observation stands at a step, so that a run whose last step has hardly moved has nothing new to be
summarized. Any number of processes may be at it: what one has summarized the others find done.
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
"""As many times longer at rest than at work: it takes a tenth of a connection's time at most."""


def create_job(database: Database) -> PeriodicJob:
    """Keeping up with the runs that grow."""
    looked_at: Mapping[UUID, int] = {}

    def do(pause: Wait) -> float:
        nonlocal looked_at
        looked_at = summarize_grown_runs(database, looked_at, pause)
        return EVERY_SECONDS

    return PeriodicJob("summaries", do)


def summarize_grown_runs(
    database: Database, looked_at: Mapping[UUID, int], pause: Wait = lambda _: False
) -> dict[UUID, int]:
    """Summarize what the running runs have observed since they were looked at, until `pause` says it is time to end.

    `looked_at`, and what it gives for the next pass: the last step that each long one had then.
    """
    found: dict[UUID, int] = {}
    with database.reading() as tx:
        project_ids = [project.id for project in projects.list_projects(tx)]
    for project_id in project_ids:
        after: UUID | None = UUID(int=0)
        while after is not None:
            begun = time.perf_counter()
            with database.reading() as tx:
                page = series.list_running_runs(tx, project_id, after, RUNS_AT_A_TIME)
                long = {run_id: last_step for run_id, last_step in page if last_step >= series.OBSERVATIONS_AT_A_TIME}
                # After a resumption the last step lies before the one that was looked at.
                found |= {run_id: min(looked_at.get(run_id, 0), last_step) for run_id, last_step in long.items()}
                grown = [run_id for run_id in long if long[run_id] - found[run_id] >= series.OBSERVATIONS_AT_A_TIME]
                metrics = observations.load_last_steps(tx, grown) if grown else {}
            if pause(RESTS * (time.perf_counter() - begun)):
                return found
            for run_id in grown:
                for metric in metrics[run_id]:
                    if series.catch_up_summaries(database, run_id, metric, lambda seconds: pause(RESTS * seconds)):
                        return found
                found[run_id] = long[run_id]
            after = page[-1][0] if len(page) == RUNS_AT_A_TIME else None
    return found

"""Lets parked jobs run while nobody waits for their GPUs, and sets them aside again.

The service is told nothing: the run stays parked, its evals count, and the decision is taken back once one of them is
no longer suspect. Where the job fits, and when, is left to its scheduler.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Collection

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.job_control import Job, Parked, Present
from evalstop_client.receivers.stop.webhooks import Receiver

logger = logging.getLogger("evalstop_client.receivers")

LOOK_POLLS = 30.0
"""Polls from one look at the parked jobs to the next: a look asks for the whole queue."""

OthersWait = Callable[[Job, Collection[Job]], bool]
"""Whether any job waits for the resources that a job has or would get, other than all these parked ones."""


def add_return_option(parser: argparse.ArgumentParser) -> None:
    text = "how often a parked job may run while nobody waits, and be set aside again (default: 0, never)"
    parser.add_argument("--return-idle", type=int, default=0, metavar="N", help=text)


class IdleReturns:
    """Looks at the parked jobs of `receiver`; `most`: how often each may have run and been set aside again."""

    def __init__(self, receiver: Receiver, others_wait: OthersWait, most: int) -> None:
        self._receiver = receiver
        self._others_wait = others_wait
        self._most = most

    def run(self) -> None:
        """Look again and again, until the process ends."""
        while True:
            time.sleep(LOOK_POLLS * self._receiver.context.timeouts.poll_seconds)
            self.look()

    def look(self) -> None:
        """Let parked jobs run that are in nobody's way, and set those aside that are."""
        entries = self._receiver.context.journal.list_parked()
        parked = {entry.request.decision_id: entry.stop.job for entry in entries if entry.stop.job is not None}
        for decision_id, job in parked.items():
            try:
                with self._receiver.resuming:  # a job that a person resumes meanwhile must not be set aside
                    self._look_at(decision_id, job, parked.values())
            except (RequestRefused, SchedulerUnavailable) as error:
                logger.info("job %s, which is parked: %s", job.id, error.detail or error)
            except Exception:  # any error: the other jobs, and the next look
                logger.exception("job %s, which is parked, could not be looked at", job.id)

    def _look_at(self, decision_id: str, job: Job, parked: Collection[Job]) -> None:
        journal, job_control = self._receiver.context.journal, self._receiver.context.job_control
        entry = journal.find_entry(decision_id)
        if entry is None or not entry.stop.is_parked:
            return
        state = job_control.check_parked(job)
        may_return = isinstance(state, Parked) and entry.stop.idle_returns < self._most
        if may_return and not self._others_wait(job, parked):
            job_control.resume_job(job)
            logger.info("job %s, which is parked, may run while nobody waits", job.id)
        elif isinstance(state, Present) and self._others_wait(job, parked):
            if state.runs:  # counted first: it rather runs once less than once more, if the receiver dies in between
                journal.count_idle_return(decision_id)
            job_control.park_job(job, entry.request)
            logger.info("job %s is set aside again, since others wait", job.id)

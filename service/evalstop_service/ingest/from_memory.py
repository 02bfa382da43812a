"""Working news in from memory alone: no transaction, no waiting, and most news need no more.

arrivals ──> FromMemory ──> one statement (`stroke`)     saved if all runs are still as they were remembered
                │   └─────> a transaction (`go_on`)      when a verdict became another, or a pointer moved
                └── None ─> `junction.take`              what is remembered does not suffice: late points, repeats
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from evalstop_service.ingest.apply import Answer, work_in
from evalstop_service.ingest.messages import Arrival, Points, Receipt
from evalstop_service.ingest.run_cache import LiveRuns
from evalstop_service.ingest.unit_of_work import NeedsTransaction, Work
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.compare_and_save import Stroke
from evalstop_service.store.database import Database


class FromMemory:
    """News worked into runs as this process remembers them; nothing of it is stored yet.

    `answers`: what each arrival is answered once all is stored; None where what is remembered does not suffice.
    """

    def __init__(self, live_runs: LiveRuns, arrivals: Sequence[Arrival], now: datetime) -> None:
        self._live_runs = live_runs
        self._arrivals = arrivals
        self._held = live_runs.take_out_own({arrival.run_id for arrival in arrivals})
        self._work = Work(now, self._held)
        self._too_little: set[UUID] = set()
        self.answers = [self._answer(arrival) for arrival in arrivals]
        answered = {arrival.run_id for arrival, answer in zip(arrivals, self.answers, strict=True) if answer}
        for run_id in self._held.keys() - answered:
            self._work.let_go(run_id)
            live_runs.put_back([self._held.pop(run_id)])

    @property
    def is_whole(self) -> bool:
        """Whether one statement stores all."""
        return not self._work.unfinished

    @property
    def stroke(self) -> Stroke:
        """What that statement stores."""
        return self._work.stroke()

    def go_on(self, database: Database) -> None:
        """Store all in a transaction, with what follows from it; raises Moved."""
        with database.transaction() as tx:
            self._work.go_on_in(tx)
        for place, (arrival, answer) in enumerate(zip(self._arrivals, self.answers, strict=True)):
            if isinstance(answer, Receipt):
                self.answers[place] = replace(answer, decision=self._work.decision(self._held[arrival.run_id]))

    def remember(self, service_metrics: ServiceMetrics) -> None:
        """All has been stored: remember the runs as they are now."""
        self._live_runs.put_back(self._held.values())
        service_metrics.live_runs.labels("hit").inc(len(self._held))
        service_metrics.detector_seconds.observe(self._work.detector_seconds)

    def _answer(self, arrival: Arrival) -> Answer | None:
        run_id = arrival.run_id
        live = self._held.get(run_id)
        # What comes after something that has to wait waits as well.
        if live is None or run_id in self._too_little or run_id in self._work.unfinished:
            return None
        if not isinstance(arrival.news, Points):
            self._too_little.add(run_id)
            return None
        try:
            return work_in(self._work, live, arrival)
        except NeedsTransaction:
            self._too_little.add(run_id)
            return None

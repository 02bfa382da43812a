"""Commits one group of messages: load, apply, save, answer.

load ──> apply ──> save ──> answer
 ^         ^         └─ another process saved the run: load it, apply again
 │         └─────────── Needs: load facts, apply again
 └───────────────────── failed: retry, then each message alone
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from datetime import datetime
from functools import partial
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import Policy

from evalstop_service.clock import Clock
from evalstop_service.ingest.applied import Applied
from evalstop_service.ingest.apply import not_found
from evalstop_service.ingest.consequences import carry_out
from evalstop_service.ingest.costs import CostlyRuns, ReplayShares
from evalstop_service.ingest.facts import NO_FACTS, Facts, Needs, load_facts
from evalstop_service.ingest.load import Loaded, load_runs
from evalstop_service.ingest.messages import Message, Receipt
from evalstop_service.ingest.run_cache import RunCache
from evalstop_service.ingest.run_state import RunState, with_decision
from evalstop_service.ingest.waiting import Group
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.store import run_health
from evalstop_service.store.database import Transaction, is_disk_full, is_transient
from evalstop_service.store.ingest import IngestStore, RunChange
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Pauses before the retries of a commit that failed for a transient reason; then its requests are refused."""

LARGE = 1_000
"""From this many observations on, they are applied in a thread, so that the event loop is not blocked."""


class GroupCommit:
    """Commits groups of messages, several at a time if they share no run.

    `let_others_start` is called in a commit that will take long. `costly` and `replays` are weighed and charged.
    """

    def __init__(
        self,
        store: IngestStore,
        cache: RunCache,
        clock: Clock,
        read_time: Callable[[Transaction], datetime],
        metrics: ServiceMetrics,
        tracer: Tracer,
        costly: CostlyRuns,
        replays: ReplayShares,
        let_others_start: Callable[[], object],
    ) -> None:
        self._store, self._cache, self._clock, self._read_time = store, cache, clock, read_time
        self._metrics, self._tracer = metrics, tracer
        self._costly, self._replays = costly, replays
        self._let_others_start = let_others_start
        self._policies: dict[UUID, Policy] = {}

    async def commit(self, group: Group) -> None:
        """Commit a group. If it fails for a non-transient reason, retry each message alone: only the bad one fails."""
        try:
            await self._commit_with_retries(group)
        except Exception as error:
            self._cache.drop_states(group)
            unanswered = [entry for entries in group.values() for entry in entries if not entry.is_answered]
            is_away = isinstance(error, sa.exc.DBAPIError) and (is_transient(error) or is_disk_full(error))
            if is_away or len(unanswered) <= 1:
                for entry in unanswered:
                    entry.answer(error)
                return
            _log.error("commit of %d requests failed; retrying each request alone", len(unanswered), exc_info=error)
            for entry in unanswered:
                await self.commit({entry.message.run_id: [entry]})

    async def _commit_with_retries(self, group: Group) -> None:
        for pause_seconds in (*PAUSES_SECONDS, None):
            started = time.perf_counter()
            links = [entry.span_context for entries in group.values() for entry in entries]
            try:
                with self._tracer.span("commit", links=links, requests=len(links)):
                    await self._commit_rounds(group)
            except sa.exc.DBAPIError as error:
                if pause_seconds is None or not is_transient(error):
                    raise
                # It may have been committed; the stored observations are then found to be duplicates.
                self._cache.drop_states(group)
                _log.warning("commit of %d requests failed (%s); retrying", len(links), error.orig)
                await asyncio.sleep(pause_seconds)
            else:
                self._metrics.commit_seconds.observe(time.perf_counter() - started)
                return

    async def _commit_rounds(self, group: Group) -> None:
        """Commit a group, in as many rounds as its messages need, usually one.

        1. Load the runs that are not cached, or that another process has or may have saved.
        2. Apply each run's messages, as many as the state and the facts permit.
        3. Save the changes of each run whose version is unchanged. A state is cached after it is saved, never before: a
           failed save leaves the cache as it was.
        4. Answer. Everything in an answer is durable. If nothing is saved, no version was compared: unless the run was
           read in this commit, it is read first, since another process may have changed it.
        5. Load the missing facts, and continue with the remaining messages. Other commits may start meanwhile.
        """
        unanswered = {
            run: open_entries
            for run, entries in group.items()
            if (open_entries := [e for e in entries if not e.is_answered])
        }
        facts: dict[UUID, Facts] = {}
        changed_elsewhere: set[UUID] = set()
        doubted: set[UUID] = set()
        while unanswered:
            now = self._clock()
            self._count_loaded("mistaken", len(changed_elsewhere))
            states, read = await self._load_states(unanswered, changed_elsewhere | doubted)
            with self._tracer.span("step detectors", runs=len(states)):
                applied, needs = await self._apply_messages(unanswered, states, facts, now)
            doubted = {result.state.run.id for result in applied if not result.is_changed} - read - facts.keys()
            if doubted:
                applied = [result for result in applied if result.state.run.id not in doubted]
            with self._tracer.span("write"):
                saved = await self._save_results(applied, now)
            changed_elsewhere = {result.state.run.id for result in applied} - {result.state.run.id for result in saved}
            for result in saved:
                entries = unanswered[result.state.run.id]
                for entry, answer in zip(entries, result.answers, strict=False):
                    entry.answer(answer)
                del entries[: len(result.answers)]
            self._record_metrics(saved)
            self._refuse_replays(unanswered, needs)
            if needs:
                self._let_others_start()
            facts = await self._store.read(partial(load_facts, needs_by_run=needs)) if needs else {}
            changed_elsewhere |= {
                run_id for run_id, run_facts in facts.items() if run_facts.version != needs[run_id][0].version
            }
            unanswered = {run_id: entries for run_id, entries in unanswered.items() if entries}

    def _refuse_replays(self, unanswered: Group, needs: dict[UUID, tuple[Run, Needs]]) -> None:
        """Answer the messages that would replay their run, of keys that have used up their share."""
        for run_id, (_, needed) in list(needs.items()):
            if objection := self._replays.find_objection(unanswered[run_id][0].message, needed):
                self._metrics.refused.labels("replays").inc()
                unanswered[run_id].pop(0).answer(objection)
                del needs[run_id]

    async def _load_states(self, unanswered: Group, doubted: Collection[UUID]) -> tuple[Loaded, Set[UUID]]:
        """The states of these runs, and which were read: cached states are used unless they are in `doubted`."""
        loaded: Loaded = {}
        cached: dict[UUID, RunState] = {}
        messages_to_load: dict[UUID, list[Message]] = {}
        for run_id, entries in unanswered.items():
            state = self._cache.find_state(run_id)
            # Another project's run is looked up as a missing one is, so that the response time reveals nothing.
            is_own = state is not None and state.run.project_id in [entry.message.project_id for entry in entries]
            if state is not None and is_own and not state.shared and not (doubted and run_id in doubted):
                loaded[run_id] = state
                continue
            messages_to_load[run_id] = [entry.message for entry in entries]
            if state is not None:
                cached[run_id] = state
        counts = Counter(hit=len(loaded))
        if messages_to_load:
            query = partial(load_runs, messages=messages_to_load, cached=cached, used=self._policies, counts=counts)
            read = await self._store.read(query)
            self._cache.put_states(state for state in read.values() if isinstance(state, RunState))
            loaded |= read
        for source, count in counts.items():
            self._count_loaded(source, count)
        return loaded, messages_to_load.keys()

    def _count_loaded(self, source: str, count: int) -> None:
        if count:
            self._metrics.loaded_runs.labels(source).inc(count)

    async def _apply_messages(
        self, unanswered: Group, states: Loaded, facts: Mapping[UUID, Facts], now: datetime
    ) -> tuple[list[Applied], dict[UUID, tuple[Run, Needs]]]:
        """Each run's messages applied, and the needs of those that could not be. Those without a state are answered."""
        started_at = time.perf_counter()
        applied: list[Applied] = []
        needs: dict[UUID, tuple[Run, Needs]] = {}
        for run_id, entries in unanswered.items():
            state = states.get(run_id)
            if not isinstance(state, RunState):  # there is no such run, or this release cannot read it
                for entry in entries:
                    entry.answer(state or not_found(entry.message))
                entries.clear()
                continue
            run_facts = facts.get(run_id, NO_FACTS) if facts else NO_FACTS
            run_facts = run_facts if run_facts.version == state.run.version else NO_FACTS
            messages = [entry.message for entry in entries]
            size = len(run_facts.points) + sum([entry.size for entry in entries])
            if size > LARGE or (self._costly and run_id in self._costly):
                self._let_others_start()
                result, seconds = await asyncio.to_thread(self._replays.apply, state, messages, run_facts, now)
            else:
                # Nothing pauses here, and the wall clock is read in a tenth of the time.
                clock = time.thread_time if run_facts.points else time.perf_counter
                result, seconds = self._replays.apply(state, messages, run_facts, now, clock)
            if self._costly.weigh_step(run_id, seconds):
                self._metrics.costly_steps.inc()
            if isinstance(result, Needs):
                needs[run_id] = state.run, result
            else:
                applied.append(result)
        if applied:
            self._metrics.detector_seconds.observe(time.perf_counter() - started_at)
        return applied, needs

    async def _save_results(self, applied: Sequence[Applied], now: datetime) -> list[Applied]:
        """Save the changes; returns those that are durable, with their consequences."""
        changed = [result for result in applied if result.is_changed]
        if not changed:
            return list(applied)
        following: dict[UUID, Applied] = {}
        costly = self._costly.find_among({result.state.run.id for result in changed}) if self._costly else {}

        def follow_up(tx: Transaction, saved: Collection[UUID]) -> None:
            for result in changed:
                if result.content is not None and result.state.run.id in saved:
                    following[result.state.run.id] = carry_out(tx, result, now, self._read_time)
            for run_id in costly.keys() & saved:
                run_health.record_costly_step(tx, run_id, costly[run_id])

        changes = [RunChange(result.before.run, result.state.run, result.points) for result in changed]
        has_consequences = bool(costly) or any(result.content is not None for result in changed)
        saved_ids = await self._store.save(changes, now, follow_up if has_consequences else None)
        saved = [following.get(result.state.run.id, result) for result in changed if result.state.run.id in saved_ids]
        self._cache.put_states([with_decision(result.state, result.decision) for result in saved])
        return saved if len(changed) == len(applied) else saved + [item for item in applied if not item.is_changed]

    def _record_metrics(self, saved: Sequence[Applied]) -> None:
        self._metrics.unjudged_runs.inc(sum([result.fails for result in saved]))
        receipts = [answer for result in saved for answer in result.answers if isinstance(answer, Receipt)]
        if not receipts:
            return
        self._metrics.commit_requests.observe(len(receipts))
        counts = {
            "accepted": sum([receipt.accepted for receipt in receipts]),
            "duplicate": sum([receipt.duplicates for receipt in receipts]),
            "conflict": sum([len(receipt.conflicts) for receipt in receipts]),
        }
        self._metrics.commit_observations.observe(counts["accepted"])
        for result, count in counts.items():
            if count:
                self._metrics.observations.labels(result).inc(count)

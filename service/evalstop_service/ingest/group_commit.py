"""Commits groups of messages: load, append, save, answer; and edits, one by one.

load ──> append ──> save ──> answer
 ^          │         └─ another process saved the run: load it, append again
 │          └─────────── not an append: an edit, in a thread
 └────────────────────── failed: retry, then each message alone
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import Policy
from msgspec.structs import replace

from evalstop_service.clock import Clock
from evalstop_service.errors import ServiceError, TooOften
from evalstop_service.ingest.changes import LARGE, Changes, append
from evalstop_service.ingest.consequences import carry_out
from evalstop_service.ingest.edits import Edit
from evalstop_service.ingest.load import RunCache, load_followed, load_runs
from evalstop_service.ingest.messages import Answer, EditCosts, Limits, Message, Receipt, not_found
from evalstop_service.ingest.run_state import RunState
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.store import observations, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.faults import Fault, find_fault
from evalstop_service.store.ingest import IngestStore, RunChange
from evalstop_service.store.run_details import EvalRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Pauses before the retries of a commit that failed for a transient reason; then its requests are refused."""


class Entry:
    """A message that waits for its answer."""

    __slots__ = ("future", "is_answered", "message", "size")

    def __init__(self, message: Message, future: asyncio.Future[Receipt], size: int) -> None:
        self.message, self.future, self.size = message, future, size
        self.is_answered = False

    def answer(self, answer: Answer | Exception) -> None:
        """Answer the message; only the first answer counts."""
        if self.is_answered:
            return
        self.is_answered = True
        if self.future.done():  # the client disconnected
            return
        if isinstance(answer, Exception):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


Group = dict[UUID, list[Entry]]
"""Messages by run, in order of arrival."""


class GroupCommit:
    """Commits groups of messages, several at a time if they share no run, and makes edits.

    `costs` are charged with replays.
    """

    def __init__(
        self,
        database: Database,
        store: IngestStore,
        cache: RunCache,
        clock: Clock,
        read_time: Callable[[Transaction], datetime],
        metrics: ServiceMetrics,
        costs: EditCosts,
        limits: Limits,
    ) -> None:
        self._store, self._cache, self._clock, self._read_time = store, cache, clock, read_time
        self._metrics = metrics
        self._policies: dict[UUID, Policy] = {}
        self._step_seconds = limits.step_seconds
        self._database, self._costs = database, costs
        # Runs whose detectors took longer than `Limits.step_seconds`, and large messages, wait for their own kind only.
        self._costly: set[UUID] = set()
        self._costly_thread = ThreadPoolExecutor(1, "costly")
        self._large_threads = ThreadPoolExecutor(limits.edits, "large")
        self._edit_threads = ThreadPoolExecutor(limits.edits, "edit")

    async def close(self) -> None:
        """Close all connections, once nothing is committed any more."""
        for threads in (self._costly_thread, self._large_threads, self._edit_threads):
            threads.shutdown()
        await self._store.close()

    async def commit(self, group: Group) -> None:
        """Append the messages of a group; for each run, up to the first that is an edit, which stays unanswered.

        If that fails for a non-transient reason, retry each message alone: only the bad one fails.
        """
        try:
            await self._retry(group, partial(self._commit_rounds, group))
        except Exception as error:
            self._cache.drop_states(group)
            unanswered = [entry for entries in group.values() for entry in entries if not entry.is_answered]
            if find_fault(error) is not Fault.BUG or len(unanswered) <= 1:
                for entry in unanswered:
                    entry.answer(error)
                return
            _log.error("commit of %d requests failed; retrying each request alone", len(unanswered), exc_info=error)
            for run_id, entries in group.items():
                for entry in entries:
                    if not entry.is_answered:
                        await self.commit({run_id: [entry]})
                    if not entry.is_answered:  # an edit, which the later ones wait for
                        break

    async def edit(self, entry: Entry) -> None:
        """Make the edit that a message asks for, in a thread, and answer it."""
        try:
            await self._retry({entry.message.run_id: [entry]}, partial(self._edit_once, entry))
        except Exception as error:
            self._cache.drop_states([entry.message.run_id])
            entry.answer(error)

    async def _retry(self, group: Group, attempt: Callable[[], Awaitable[None]]) -> None:
        for pause_seconds in (*PAUSES_SECONDS, None):
            started = time.perf_counter()
            try:
                await attempt()
            except sa.exc.DBAPIError as error:
                if pause_seconds is None or not find_fault(error).is_transient:
                    raise
                # It may have been committed; the stored observations are then found to be duplicates.
                self._cache.drop_states(group)
                requests = sum(map(len, group.values()))
                _log.warning("commit of %d requests failed (%s); retrying", requests, error.orig)
                await asyncio.sleep(pause_seconds)
            else:
                self._metrics.commit_seconds.observe(time.perf_counter() - started)
                return

    async def _commit_rounds(self, group: Group) -> None:
        """Commit a group, in as many rounds as its messages need, usually one.

        1. Load the runs that are not cached, or that another process has or may have saved.
        2. Append each run's messages, as far as they are appends and have no consequences.
        3. Save the changes of each run whose version is unchanged. A state is cached after it is saved, never before: a
           failed save leaves the cache as it was.
        4. Answer. Everything in an answer is durable.
        """
        waiting = {
            run_id: unanswered
            for run_id, entries in group.items()
            if (unanswered := [entry for entry in entries if not entry.is_answered])
        }
        while waiting:
            now = self._clock()
            states = await self._load_states(waiting)
            appended = await self._append(waiting, states, now)
            saved = await self._save(appended, now)
            for changes in saved:
                entries = waiting[changes.state.run.id]
                for entry, answer in zip(entries, changes.answers, strict=False):
                    entry.answer(answer)
                del entries[: len(changes.answers)]
            self._record_metrics(saved)
            unsaved = {changes.state.run.id for changes in appended} - {changes.state.run.id for changes in saved}
            self._cache.shared |= unsaved
            self._count_loaded("mistaken", len(unsaved))
            appended_ids = {changes.state.run.id for changes in appended}
            waiting = {run_id: entries for run_id, entries in waiting.items() if entries and run_id in appended_ids}

    async def _load_states(self, waiting: Group) -> dict[UUID, RunState]:
        """The states of these runs, from the cache unless others saved them; those without one are answered."""
        loaded: dict[UUID, RunState] = {}
        cached: dict[UUID, RunState] = {}
        missing: dict[UUID, set[UUID]] = {}
        for run_id, entries in waiting.items():
            state = self._cache.find_state(run_id)
            # Another project's run is looked up as a missing one is, so that the response time reveals nothing.
            is_own = state is not None and state.run.project_id in [entry.message.project_id for entry in entries]
            if state is not None and is_own and run_id not in self._cache.shared:
                loaded[run_id] = state
                continue
            missing[run_id] = {entry.message.project_id for entry in entries}
            if state is not None:
                cached[run_id] = state
        counts = Counter(hit=len(loaded))
        if missing:
            query = partial(load_runs, projects_by_run=missing, cached=cached, used=self._policies, counts=counts)
            read, seconds = await self._store.read(lambda tx: _measure_query(query, tx))
            begun = [run_id for run_id, state in read.items() if isinstance(state, RunState) and state.run.last_step]
            for run_id in begun if counts["rebuilt"] else ():  # after a changed plan, which cost nothing then
                self._costs.charge(waiting[run_id][0].message, seconds / len(begun))
            for run_id in missing:
                found = read.get(run_id)
                if isinstance(found, RunState):
                    loaded[run_id] = found
                    if found is cached.get(run_id):
                        self._cache.shared.discard(run_id)
                    continue
                for entry in waiting[run_id]:  # there is no such run, or this release cannot read it
                    entry.answer(found or not_found(entry.message))
            self._cache.put_states(state for state in read.values() if isinstance(state, RunState))
        for source, count in counts.items():
            self._count_loaded(source, count)
        return loaded

    def _count_loaded(self, source: str, count: int) -> None:
        if count:
            self._metrics.loaded_runs.labels(source).inc(count)

    async def _append(self, waiting: Group, states: dict[UUID, RunState], now: datetime) -> list[Changes]:
        """Each run's messages, as far as they are appends."""
        followed = [state for state in states.values() if state.awaits_decision or state.requested_eval]
        requests: dict[UUID, EvalRequest] = {}
        if followed:
            decided, requests = await self._store.read(partial(load_followed, states=followed))
            for run_id, decision in decided.items():
                states[run_id] = replace(states[run_id], decision=decision)
        started_at = time.perf_counter()
        appended: list[Changes] = []
        for run_id, state in states.items():
            if run_id in self._costly:  # its messages are edits
                continue
            messages = [entry.message for entry in waiting[run_id]]
            began = time.perf_counter()
            changes = append(state, messages, requests.get(run_id), now)
            self._weigh(run_id, time.perf_counter() - began)
            if changes.answers:
                appended.append(changes)
        if appended:
            self._metrics.detector_seconds.observe(time.perf_counter() - started_at)
        return appended

    def _weigh(self, run_id: UUID, seconds: float) -> None:
        """Note whether a run is costly. Only a step well within the budget clears it."""
        if seconds > self._step_seconds:
            self._costly.add(run_id)
            self._metrics.costly_steps.inc()
        elif seconds < self._step_seconds / 4:
            self._costly.discard(run_id)

    async def _save(self, appended: Sequence[Changes], now: datetime) -> list[Changes]:
        """Save what was appended; returns what is durable, with its consequences."""
        if not appended:
            return []
        following: dict[UUID, Changes] = {}

        def follow_up(tx: Transaction, saved: Collection[UUID]) -> None:
            for changes in appended:
                if changes.follows and changes.state.run.id in saved:
                    following[changes.state.run.id] = carry_out(tx, changes, now, self._read_time)

        rows = [RunChange(changes.before.run, changes.state.run, changes.points) for changes in appended]
        has_consequences = any(changes.follows for changes in appended)
        saved_ids = await self._store.save(rows, now, follow_up if has_consequences else None)
        saved = [following.get(item.state.run.id, item) for item in appended if item.state.run.id in saved_ids]
        self._cache.put_states(changes.state for changes in saved)
        return saved

    async def _edit_once(self, entry: Entry) -> None:
        message, counts = entry.message, Counter[str]()
        run_id, now = message.run_id, self._clock()
        edit = partial(self._edit_run, message, self._cache.find_state(run_id), now, counts)
        try:
            threads = self._large_threads if entry.size > LARGE else self._edit_threads
            threads = self._costly_thread if run_id in self._costly else threads
            changes = await asyncio.get_running_loop().run_in_executor(threads, edit)
        except ServiceError as error:
            if isinstance(error, TooOften):
                self._metrics.refused.labels("replays").inc()
            entry.answer(error)
            return
        for source, count in counts.items():
            self._count_loaded(source, count)
        self._weigh(run_id, changes.seconds)
        self._cache.put_states([changes.state])
        entry.answer(changes.answers[0])
        self._record_metrics([changes])

    def _edit_run(self, message: Message, cached: RunState | None, now: datetime, counts: Counter[str]) -> Changes:
        """Carry out a message, in any thread; raises ServiceError if it is refused. What is returned is durable.

        read the run and its rows ──> change them, judge anew ──> lock the run, save, write the consequences
                 ^                                                  │
                 └── it changed meanwhile: once more, locked ───────┘

        The run is judged before it is locked, so that neither a decision nor a post waits for a replay.
        """
        with self._database.reading() as tx:
            changes = self._judge(tx, message, cached, now, counts)
        run = changes.before.run
        if not changes.is_changed:
            return changes
        with self._database.transaction() as tx:
            if runs.lock_runs(tx, [run.id]).get(run.id) != run.version:
                changes = self._judge(tx, message, None, now, counts)
                if not changes.is_changed:
                    return changes
            observations.add_observations(tx, changes.state.run, changes.points, now)
            return carry_out(tx, changes, now, self._read_time)

    def _judge(
        self, tx: Transaction, message: Message, cached: RunState | None, now: datetime, counts: Counter[str]
    ) -> Changes:
        run_id, known = message.run_id, {} if cached is None else {message.run_id: cached}
        state = load_runs(tx, {run_id: {message.project_id}}, known, self._policies, counts).get(run_id)
        if not isinstance(state, RunState):
            raise state or not_found(message)
        refuse_pruned_run(state.run)
        decided, requests = load_followed(tx, [state])
        state = replace(state, decision=decided.get(run_id, state.decision))
        edit = Edit(tx, state, requests.get(run_id), now, lambda: self._costs.require_share(message))
        started = time.thread_time()
        changes = edit.apply(message.content)
        changes.seconds = time.thread_time() - started
        if edit.has_replayed:
            self._costs.charge(message, changes.seconds)
        return changes

    def _record_metrics(self, saved: Iterable[Changes]) -> None:
        self._metrics.unjudged_runs.inc(sum([changes.fails for changes in saved]))
        receipts = [answer for changes in saved for answer in changes.answers if isinstance(answer, Receipt)]
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


def _measure_query(query: Callable[[Transaction], T], tx: Transaction) -> tuple[T, float]:
    """The result of a query, and the seconds of processor time that it took, with the detectors that it stepped."""
    started = time.thread_time()
    result = query(tx)
    return result, time.thread_time() - started

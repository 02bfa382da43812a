"""Group commit: messages that arrive during a commit share the next one.

    submit ──> waiting, by run ──> group ──> load ──> apply ──> save ──> answer
                                     ^         ^         └─ Needs: load facts, apply again
                                     │         └─────────── another process saved the run: load it, apply again
                                     └───── all waiting messages of runs that are in no commit

Requests are not delayed to build larger batches: a single message is committed at once. Everything runs on one event
loop. A run is in at most one commit at a time, so that two commits of this process never wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import Policy
from opentelemetry.trace import INVALID_SPAN_CONTEXT, get_current_span

from evalstop_service.clock import Clock
from evalstop_service.errors import Closed, Overloaded
from evalstop_service.ingest.applied import Applied
from evalstop_service.ingest.apply import not_found
from evalstop_service.ingest.consequences import carry_out
from evalstop_service.ingest.costs import CostlyRuns, ReplayShares
from evalstop_service.ingest.facts import NO_FACTS, Facts, Needs, load_facts
from evalstop_service.ingest.limits import Limits
from evalstop_service.ingest.load import Loaded, load_runs
from evalstop_service.ingest.messages import Message, Receipt
from evalstop_service.ingest.run_cache import RunCache
from evalstop_service.ingest.run_state import RunState, with_decision
from evalstop_service.ingest.waiting import Entry, Group, take_group
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.store import run_health
from evalstop_service.store.database import Database, Transaction, is_disk_full, is_transient
from evalstop_service.store.ingest import IngestStore, RunChange
from evalstop_service.store.ingest_postgres import PostgresIngest
from evalstop_service.store.ingest_sqlite import SqliteIngest
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Pauses before the retries of a commit that failed for a transient reason; then its requests are refused."""

MOST_LONG = 4
"""Commits under way that others do not wait for."""

LARGE = 1_000
"""From this many observations on, they are applied in a thread, so that the event loop is not blocked."""


class Committer:
    """Accepts messages and answers each once it is durable. `run` binds it to an event loop."""

    def __init__(
        self,
        database: Database,
        cache: RunCache,
        clock: Clock,
        metrics: ServiceMetrics,
        limits: Limits | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._database, self._cache, self._clock, self._metrics = database, cache, clock, metrics
        self._limits = limits or Limits()
        self._tracer = tracer or Tracer()
        self._policies: dict[UUID, Policy] = {}
        self._waiting: Group = {}
        self._busy: set[UUID] = set()
        self._size = 0
        self._commits: set[asyncio.Task[None]] = set()
        self._most_commits = 1 if database.embedded else self._limits.commits
        self._started_at = 0.0
        self._is_scheduled, self._is_closed = False, True
        self._costly = CostlyRuns(self._limits.step_seconds)
        self._apart: asyncio.Task[None] | None = None  # the commit of one costly run
        self._long: set[asyncio.Task[None]] = set()  # commits that others do not wait for, with that one
        self.replays = ReplayShares(self._limits.replays)
        metrics.waiting_observations.set_function(lambda: self._size)

    @property
    def waiting(self) -> int:
        """Observations waiting for a commit or in one."""
        return self._size

    def count_refused(self, reason: str) -> None:
        """Count a refused message."""
        self._metrics.refused.labels(reason).inc()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Accept messages within the block; at its end commit the waiting ones and refuse new ones."""
        self._loop = asyncio.get_running_loop()
        self._store: IngestStore = (SqliteIngest if self._database.embedded else PostgresIngest)(self._database)
        self._is_closed = False
        try:
            yield
        finally:
            self._is_closed = True
            while self._waiting or self._commits:
                self._start_commits()
                await asyncio.wait(list(self._commits))
            await self._store.close()

    def submit(self, message: Message) -> asyncio.Future[Receipt]:
        """Commit a message; call on the event loop. Fails with NotFound, Conflict, Overloaded, and DBAPIError."""
        future: asyncio.Future[Receipt] = self._loop.create_future()
        size = message.size
        if self._is_closed or (self._size and self._size + size > self._limits.waiting):
            self._metrics.refused.labels("overloaded").inc()
            future.set_exception(Closed() if self._is_closed else Overloaded())
            return future
        self._size += size
        context = get_current_span().get_span_context() if self._tracer.recording else INVALID_SPAN_CONTEXT
        self._waiting.setdefault(message.run_id, []).append(Entry(message, future, size, context))
        if not self._is_scheduled and (self._may_start() or self._may_start_apart(message.run_id)):
            self._is_scheduled = True  # other messages of this loop iteration join it
            self._loop.call_soon(self._start_commits)
        return future

    def submit_and_wait(self, message: Message) -> Receipt:
        """Commit a message from a thread other than the event loop's. Raises the errors of `submit`."""

        async def submit() -> Receipt:
            return await self.submit(message)

        if self._is_closed:
            raise Closed
        return asyncio.run_coroutine_threadsafe(submit(), self._loop).result()

    def _may_start(self) -> bool:
        """Committing one group at a time makes the groups largest, which costs least."""
        under_way = len(self._commits) - len(self._long)
        is_slow = self._loop.time() - self._started_at >= self._limits.slow_seconds
        return not under_way or (is_slow and under_way < self._most_commits)

    def _let_others_start(self) -> None:
        """Let other commits start before the current one ends, because it will take long."""
        task = asyncio.current_task()
        if task is not None and task not in self._long and len(self._long) < MOST_LONG:
            self._long.add(task)
            self._start_commits()

    def _may_start_apart(self, run_id: UUID) -> bool:
        return bool(self._costly) and self._apart is None and run_id in self._costly and run_id not in self._busy

    def _start_commits(self) -> None:
        self._is_scheduled = False
        while self._may_start() and (group := self._next_group()):
            self._started_at = self._loop.time()
            self._loop.call_later(self._limits.slow_seconds, self._start_commits)
            self._start_commit(group)
        if self._costly:
            run_id = next((run_id for run_id in self._waiting if self._may_start_apart(run_id)), None)
            if run_id is not None:
                self._busy.add(run_id)
                self._apart = self._start_commit({run_id: self._waiting.pop(run_id)})
                self._long.add(self._apart)

    def _start_commit(self, group: Group) -> asyncio.Task[None]:
        task = self._loop.create_task(self._commit_group(group))
        self._commits.add(task)
        task.add_done_callback(self._end_commit)
        return task

    def _end_commit(self, commit: asyncio.Task[None]) -> None:
        self._commits.discard(commit)
        self._long.discard(commit)
        if commit is self._apart:
            self._apart = None
        self._start_commits()

    def _next_group(self) -> Group:
        """The waiting messages of runs that are in no commit, oldest first, up to the size of one commit.

        Runs whose detectors cost too much are committed separately.
        """
        requests, observations = self._limits.requests, self._limits.observations
        idle = not self._busy and not self._costly
        if idle and self._size <= observations and sum(map(len, self._waiting.values())) <= requests:
            group, self._waiting = self._waiting, {}
        else:
            ready = [run_id for run_id in self._waiting if run_id not in self._busy and run_id not in self._costly]
            group = take_group(self._waiting, ready, requests, observations)
        self._busy.update(group)
        return group

    async def _commit_group(self, group: Group) -> None:
        entries = [entry for run_entries in group.values() for entry in run_entries]
        try:
            await self._commit_or_split(group)
        except BaseException as error:
            for entry in entries:
                entry.answer(error if isinstance(error, Exception) else Closed())
            if not isinstance(error, Exception):
                raise
        finally:
            self._size -= sum([entry.size for entry in entries])
            self._busy -= group.keys()

    async def _commit_or_split(self, group: Group) -> None:
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
                await self._commit_or_split({entry.message.run_id: [entry]})

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
            _answer_missing(unanswered, states)
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
            if objection := self.replays.find_objection(unanswered[run_id][0].message, needed):
                self.count_refused("replays")
                unanswered[run_id].pop(0).answer(objection)
                del needs[run_id]

    async def _load_states(self, unanswered: Group, doubted: Collection[UUID]) -> tuple[Loaded, Set[UUID]]:
        """The states of these runs, and which were read: cached states are used unless they are in `doubted`."""
        loaded: Loaded = {}
        cached: dict[UUID, RunState] = {}
        messages_to_load: dict[UUID, list[Message]] = {}
        for run_id, entries in unanswered.items():
            state, messages = self._cache.find_state(run_id), [entry.message for entry in entries]
            # Another project's run is looked up as a missing one is, so that the response time reveals nothing.
            is_own = state is not None and state.run.project_id in [message.project_id for message in messages]
            if state is not None and is_own and not state.shared and not (doubted and run_id in doubted):
                loaded[run_id] = state
                continue
            messages_to_load[run_id] = messages
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
        """Each run's messages applied, and the needs of those that could not be."""
        started_at = time.perf_counter()
        applied: list[Applied] = []
        needs: dict[UUID, tuple[Run, Needs]] = {}
        for run_id, entries in unanswered.items():
            state = states.get(run_id)
            if not isinstance(state, RunState):
                continue
            run_facts = facts.get(run_id, NO_FACTS) if facts else NO_FACTS
            run_facts = run_facts if run_facts.version == state.run.version else NO_FACTS
            messages = [entry.message for entry in entries]
            started = time.perf_counter()
            size = len(run_facts.points) + sum([entry.size for entry in entries])
            if size > LARGE or (self._costly and run_id in self._costly):
                self._let_others_start()
                result = await asyncio.to_thread(self.replays.apply, state, messages, run_facts, now)
            else:
                result = self.replays.apply(state, messages, run_facts, now)
            seconds = time.perf_counter() - started
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
                    following[result.state.run.id] = carry_out(tx, result, now)
            for run_id in costly.keys() & saved:
                run_health.record_costly_step(tx, run_id, costly[run_id])

        changes = [RunChange(result.before.run, result.state.run, result.points) for result in changed]
        has_consequences = bool(costly) or any(result.content is not None for result in changed)
        saved_ids = await self._store.save(changes, now, follow_up if has_consequences else None)
        saved = [following.get(result.state.run.id, result) for result in changed if result.state.run.id in saved_ids]
        self._cache.put_states(with_decision(result.state, result.decision) for result in saved)
        return saved + [result for result in applied if not result.is_changed]

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


def _answer_missing(unanswered: Group, states: Loaded) -> None:
    """Answer the messages of runs that do not exist, or that this release cannot read."""
    for run_id, entries in unanswered.items():
        state = states.get(run_id)
        if entries and not isinstance(state, RunState):
            for entry in entries:
                entry.answer(state or not_found(entry.message))
            entries.clear()

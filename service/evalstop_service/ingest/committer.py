"""Group commit: messages that arrive during a commit share the next one.

    submit ──> waiting, by run ──> group ──> commit (`group_commit`) ──> answer
                                     │         └──> an edit: alone, before the other messages of its run
                                     └───── all waiting messages of runs that are in no commit

Requests are not delayed to build larger batches: a single message is committed at once. Everything runs on one event
loop. A run is in at most one commit at a time, so that two commits of this process never wait for each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from evalstop_service.clock import Clock
from evalstop_service.errors import Overloaded
from evalstop_service.ingest.group_commit import Entry, Group, GroupCommit
from evalstop_service.ingest.load import RunCache
from evalstop_service.ingest.messages import EditCosts, Limits, Message, Receipt
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ingest import IngestStore, PostgresIngest, SqliteIngest

T = TypeVar("T")

LARGE_GROUP = 300
"""From this many waiting observations on, they are applied while the database saves those of another commit."""


class Committer:
    """Accepts messages and answers each once it is durable. `run` binds it to an event loop.

    `read_time`: the time of decisions, whose windows end by the database's clock; None: `clock`.
    """

    def __init__(
        self,
        database: Database,
        cache: RunCache,
        clock: Clock,
        metrics: ServiceMetrics,
        limits: Limits | None = None,
        read_time: Callable[[Transaction], datetime] | None = None,
    ) -> None:
        self._database, self._cache, self._clock, self._metrics = database, cache, clock, metrics
        self._limits = limits or Limits()
        self._read_time = read_time or (lambda _: clock())
        self._waiting: Group = {}
        self._busy: set[UUID] = set()
        self._waiting_size = 0  # observations that wait for a commit
        self._size = 0  # and those in a commit
        self._commits: set[asyncio.Task[None]] = set()
        self._most_commits = 1 if database.embedded else self._limits.commits
        self._started_at = 0.0
        self._is_scheduled = False
        self._is_closed = True
        self._edits: set[asyncio.Task[None]] = set()
        self.costs = EditCosts(self._limits)
        metrics.waiting_observations.set_function(lambda: self._size)
        metrics.cached_bytes.set_function(lambda: cache.bytes)

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
        self._reading = asyncio.Lock()
        self._group_commit = GroupCommit(
            self._database,
            self._store,
            self._cache,
            self._clock,
            self._read_time,
            self._metrics,
            self.costs,
            self._limits,
        )
        self._is_closed = False
        try:
            yield
        finally:
            self._is_closed = True
            while self._waiting or self._commits or self._edits:
                self._start_commits()
                await asyncio.wait([*self._commits, *self._edits], return_when=asyncio.FIRST_COMPLETED)
            await self._group_commit.close()

    async def read(self, query: Callable[[Transaction], T]) -> T:
        """The result of a query on a connection that saves observations; one at a time, to open no more than one."""
        async with self._reading:
            return await self._store.read(query)

    def submit(self, message: Message) -> asyncio.Future[Receipt]:
        """Commit a message; call on the event loop. Fails with NotFound, Conflict, Overloaded, and DBAPIError."""
        future: asyncio.Future[Receipt] = self._loop.create_future()
        size = message.size
        if self._is_closed or (self._size and self._size + size > self._limits.waiting):
            self._metrics.refused.labels("overloaded").inc()
            future.set_exception(Overloaded())
            return future
        self._size += size
        self._waiting_size += size
        self._waiting.setdefault(message.run_id, []).append(Entry(message, future, size))
        if not self._is_scheduled and self._may_start():
            self._is_scheduled = True  # other messages of this loop iteration join it
            self._loop.call_soon(self._start_commits)
        return future

    def submit_and_wait(self, message: Message) -> Receipt:
        """Commit a message from a thread other than the event loop's. Raises the errors of `submit`."""

        async def submit() -> Receipt:
            return await self.submit(message)

        if self._is_closed:
            raise Overloaded
        return asyncio.run_coroutine_threadsafe(submit(), self._loop).result()

    def _may_start(self) -> bool:
        """Committing one group at a time makes the groups largest, which costs least. For a large group it costs more
        that the event loop and the database wait for each other."""
        under_way = len(self._commits)
        if not 0 < under_way < self._most_commits:
            return not under_way
        if under_way == 1 and self._waiting_size >= LARGE_GROUP:
            return True
        return self._loop.time() - self._started_at >= self._limits.slow_seconds

    def _start_commits(self) -> None:
        self._is_scheduled = False
        while self._may_start() and (group := self._next_group()):
            self._started_at = self._loop.time()
            self._loop.call_later(self._limits.slow_seconds, self._start_commits)
            self._waiting_size -= sum([entry.size for entries in group.values() for entry in entries])
            task = self._loop.create_task(self._commit_group(group))
            self._commits.add(task)
            task.add_done_callback(self._end_commit)

    def _end_commit(self, commit: asyncio.Task[None]) -> None:
        self._commits.discard(commit)
        self._start_commits()

    def _next_group(self) -> Group:
        """The waiting messages of runs that are in no commit, oldest first, up to the size of one commit."""
        requests, observations = self._limits.requests, self._limits.observations
        if not self._busy and self._waiting_size <= observations and sum(map(len, self._waiting.values())) <= requests:
            group, self._waiting = self._waiting, {}
        else:
            ready = [run_id for run_id in self._waiting if run_id not in self._busy]
            group = take_group(self._waiting, ready, requests, observations)
        self._busy.update(group)
        return group

    async def _commit_group(self, group: Group) -> None:
        """Commit a group. A run whose next message is an edit stays busy until that is made."""
        entries = [entry for run_entries in group.values() for entry in run_entries]
        try:
            await self._group_commit.commit(group)
        except BaseException as error:
            for entry in entries:
                entry.answer(error if isinstance(error, Exception) else Overloaded())
            if not isinstance(error, Exception):
                raise
        finally:
            self._size -= sum([entry.size for entry in entries if entry.is_answered])
            left = {
                run_id: unanswered
                for run_id, run_entries in group.items()
                if (unanswered := [entry for entry in run_entries if not entry.is_answered])
            }
            self._busy -= group.keys() - left.keys()
            for run_id, run_entries in left.items():
                task = self._loop.create_task(self._edit_run(run_id, run_entries))
                self._edits.add(task)
                task.add_done_callback(self._end_edit)

    async def _edit_run(self, run_id: UUID, entries: list[Entry]) -> None:
        """Make the edit that the first of these messages asks for; the others wait for a commit again."""
        edit, *rest = entries
        try:
            await self._group_commit.edit(edit)
        finally:
            edit.answer(Overloaded())  # unless it was answered
            self._size -= edit.size
            self._busy.discard(run_id)
            if rest:
                self._waiting[run_id] = rest + self._waiting.get(run_id, [])
                self._waiting_size += sum([entry.size for entry in rest])

    def _end_edit(self, edit: asyncio.Task[None]) -> None:
        self._edits.discard(edit)
        self._start_commits()


def take_group(waiting: Group, run_ids: Iterable[UUID], requests: int, observations: int) -> Group:
    """Take from the waiting messages of these runs as many as one commit may hold, at least one."""
    group: Group = {}
    for run_id in run_ids:
        entries = waiting[run_id]
        for count, entry in enumerate(entries):
            requests, observations = requests - 1, observations - entry.size
            if group and (requests < 0 or observations < 0):
                if count:
                    waiting[run_id] = entries[count:]
                return group
            group.setdefault(run_id, []).append(entry)
        del waiting[run_id]
    return group


@contextmanager
def running_in_thread(committer: Committer) -> Iterator[Committer]:
    """Run a committer on its own event loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="committer", daemon=True)
    thread.start()
    running = committer.run()
    try:
        asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
        try:
            yield committer
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

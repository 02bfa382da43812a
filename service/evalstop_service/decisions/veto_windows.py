"""Ends veto windows: a stop is requested once every process that hears vetoes has written after the end of its window.

Each process that serves HTTP is a listener. About once a second, while a window is over or ends soon, it

1. reads the database's time, and how long ago it last did so;
2. lets its event loop take in all requests that had arrived by then;
3. writes `heard_until`: it has dealt with all vetoes that were sent before. If some may not have been heard since it
   last wrote, because it was stopped, could not write, or refused one, the same transaction extends the open windows;
4. requests the stops whose windows ended before the earliest `heard_until` of all listeners, and hands over those that
   a receiver or the trainer asked for before it.

Nothing else ends a window or hands a stop over in a project with a window. So a process that could not hear vetoes
cannot be overtaken by one that hands stops over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from anyio import to_thread

from evalstop_service.background import handle_each
from evalstop_service.clock import Clock
from evalstop_service.decisions import holds, transitions
from evalstop_service.domain.decision_events import GuardsRaised, WindowEnded, WindowReopened
from evalstop_service.store import decisions, hand_overs, runs
from evalstop_service.store.database import Database, Transaction, decision_lane, read_now
from evalstop_service.store.hand_overs import UnsentStop
from evalstop_service.store.ids import new_id

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""The longest time between two looks at the windows."""

AHEAD_SECONDS = 5.0
"""How long before the end of a window the listeners begin to write."""

GAP_SECONDS = 5.0
"""After this long without a look at the database, vetoes may not have been heard."""

EXTENSION_SECONDS = 60.0
"""How long people have to repeat a veto that may not have been heard; in a project with a shorter window, that long."""

ARRIVING_SECONDS = 5.0
"""How long a veto that has not arrived completely holds up the ends of windows: its sender may be a stranger."""

ANSWERED_SECONDS = 30.0
"""How long one that has arrived does."""

LOST_SECONDS = 30.0
"""A listener that is silent while another one has written for this long is removed; if it returns, it begins anew."""

TURNS = 20
"""Turns of the event loop from the arrival of a connection to the start of its request, and some more."""

REASON = "vetoes may not have been heard, so the veto window is longer"

MOST_AT_ONCE = 50
"""Stops to request before the listener looks again."""

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(eq=False)
class HeardVeto:
    """A veto in progress: when its first byte was seen, by `time.monotonic`, after which time it was sent, and whether
    it has arrived completely."""

    seen: float
    sent_after: float
    arrived: bool = False

    def holds_windows(self, now: float) -> bool:
        """Whether stops have to wait for it if their windows ended after it was sent."""
        return now - self.seen <= (ANSWERED_SECONDS if self.arrived else ARRIVING_SECONDS)


@dataclass(frozen=True)
class _Look:
    """What a look at the database found: its time, before the monotonic time `until`; the windows' next ends."""

    now: datetime
    until: float
    first_end: datetime | None
    next_end: datetime | None

    @property
    def is_urgent(self) -> bool:
        """Whether a window is over or ends soon."""
        return self.first_end is not None and self.first_end <= self.now + timedelta(seconds=AHEAD_SECONDS)

    @property
    def pause_seconds(self) -> float:
        """The time until the next look: the next end of a window, if that is sooner."""
        if self.next_end is None:
            return BEAT_SECONDS
        return min(BEAT_SECONDS, (self.next_end - self.now).total_seconds() + 0.001)


class VetoListener:
    """One process that hears vetoes; `clock` is the embedded database's. `in_thread` calls a function in one of the
    threads that vetoes use, so that what delays them delays the ends of windows."""

    def __init__(self, database: Database, clock: Clock, in_thread: InThread = to_thread.run_sync) -> None:
        self._database, self._clock, self._in_thread = database, clock, in_thread
        self._id = new_id()
        self._vetoes: set[HeardVeto] = set()
        # A veto that this process sees now was sent after the last look but one: before it, the event loop had taken in
        # all that had arrived. While a process is stopped, vetoes wait in its sockets, and are seen late.
        self._looked, self._looked_before = time.monotonic(), time.monotonic()
        self._seen_at: datetime | None = None  # the last look, by the database's clock
        self._writing_since: datetime | None = None
        self._unheard: set[UUID | None] = {None}  # a process that begins heard nothing before
        self._is_listed = False

    def report_failure(self, project_id: UUID | None) -> None:
        """A veto may have been refused: extend the windows of its project, or of all if it is not known. Like
        `hearing`, to be called on the event loop."""
        self._unheard.add(project_id)

    @contextmanager
    def hearing(self) -> Iterator[HeardVeto]:
        """A veto is in progress until the block ends."""
        veto = HeardVeto(time.monotonic(), self._looked_before)
        self._vetoes.add(veto)
        try:
            yield veto
        finally:
            self._vetoes.discard(veto)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen within the block, in which the process accepts vetoes."""

        async def listen(pause_seconds: float) -> None:
            while True:
                await asyncio.sleep(pause_seconds)
                pause_seconds = await self.listen_once()

        with decision_lane():
            # The first round comes before the first veto: until then the others do not wait for this process.
            task = asyncio.create_task(listen(await self.listen_once()))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            with suppress(Exception), decision_lane():  # if it fails, the others remove it
                await self._in_thread(self._leave)

    async def listen_once(self) -> float:
        """Do one round; returns the seconds until the next. A round that fails has the next one extend windows."""
        try:
            look: _Look = await self._in_thread(self._look)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._looked_before, self._looked = self._looked, look.until
            if not look.is_urgent and not self._unheard and self._is_listed and not self._has_gap(look.now):
                self._seen_at, self._writing_since = look.now, None
                return look.pause_seconds
            heard_until = look.now - timedelta(seconds=self._find_wait(look.until))
            # Taken in the same turn of the loop: a veto that is not in progress any more has reported its failure.
            unheard, self._unheard = self._unheard, set()
            try:
                await self._in_thread(partial(self._write, look.now, heard_until, unheard))
            except BaseException:
                self._unheard |= unheard
                raise
        except Exception as error:
            self._unheard.add(None)
            log.warning("no veto window ends, since the database cannot be written: %s", error)
            return BEAT_SECONDS
        try:
            is_more = await self._in_thread(self._request_and_hand_over)
        except Exception:  # of one stop, which must not keep the windows of all others open
            log.exception("a stop whose veto window is over was not requested")
            return BEAT_SECONDS
        return 0.0 if is_more else look.pause_seconds

    def _look(self) -> _Look:
        with self._database.reading() as tx:
            now = read_now(tx, self._clock)
            return _Look(now, time.monotonic(), *hand_overs.read_windows(tx, now))

    def _find_wait(self, until: float) -> float:
        """How long before `until` the oldest veto that holds up windows was sent."""
        now = time.monotonic()
        holding = [veto.sent_after for veto in self._vetoes if veto.holds_windows(now)]
        return max(0.0, until - min(holding, default=until))

    def _has_gap(self, now: datetime) -> bool:
        """Whether it is too long since the last look, or the clock was set."""
        return self._seen_at is not None and not 0 <= (now - self._seen_at).total_seconds() <= GAP_SECONDS

    def _write(self, now: datetime, heard_until: datetime, unheard: Collection[UUID | None]) -> None:
        """Write how far this process has heard vetoes; extends windows if it may not have heard all since then."""
        is_unheard = None in unheard or self._has_gap(now)
        with self._database.transaction() as tx:
            others = hand_overs.read_listeners(tx)
            is_listed = others.pop(self._id, None) is not None
            if self._is_listed and not is_listed:  # the others took it for lost
                is_unheard = True
            elif not self._is_listed and others and now - max(others.values()) <= timedelta(seconds=GAP_SECONDS):
                is_unheard = False  # others heard the vetoes before it began
            projects = None if is_unheard else [known for known in unheard if known is not None]
            extended = 0
            if projects is None or projects:
                extended = hand_overs.extend_windows(tx, now, EXTENSION_SECONDS, projects, REASON)
                extended += _reopen_windows(tx, now, projects)
            hand_overs.save_listener(tx, self._id, heard_until)
            self._writing_since = self._writing_since or now
            if now - self._writing_since >= timedelta(seconds=LOST_SECONDS):
                lost = [key for key, heard in others.items() if heard < now - timedelta(seconds=LOST_SECONDS)]
                hand_overs.remove_listeners(tx, lost)
        self._is_listed, self._seen_at = True, now
        if extended:
            log.warning("vetoes may not have been heard: extended %d veto windows", extended)

    def _request_and_hand_over(self) -> bool:
        with self._database.reading() as tx:
            heard_until = hand_overs.read_heard_until(tx)
        read_time = partial(read_now, here=self._clock)
        if heard_until is None:
            return False
        requested = request_stops(self._database, heard_until, read_time)
        handed_over = hand_over_stops(self._database, heard_until, read_time)
        return MOST_AT_ONCE in (requested, handed_over)

    def _leave(self) -> None:
        with self._database.transaction() as tx:
            hand_overs.remove_listeners(tx, [self._id])


def request_stops(database: Database, heard_until: datetime, read_time: Callable[[Transaction], datetime]) -> int:
    """Request the stops whose windows ended by `heard_until`, some at a time; returns how many were found.

    Each in its own transaction: an error does not delay the others; it is raised at the end.
    """

    def request(pending: UnsentStop) -> None:
        with database.transaction() as tx:
            run = runs.lock_run(tx, pending.project_id, pending.run_id)
            decision, now = decisions.lock_decision(tx, run.id, pending.id), read_time(tx)
            # The job may have got other live runs since the decision.
            raised = holds.find_shared_job(tx, run, decision)
            if not raised and runs.has_pending_stop(tx, run, decision.action, after=heard_until):
                return  # a person has another stop of this job wait
            event = GuardsRaised(now, raised) if raised else WindowEnded(now, heard_until)
            transitions.move_decision(tx, run, decision, event)

    with database.reading() as tx:
        over = hand_overs.list_windows_over(tx, heard_until, MOST_AT_ONCE)
    handle_each(over, request)
    return len(over)


def hand_over_stops(database: Database, heard_until: datetime, read_time: Callable[[Transaction], datetime]) -> int:
    """Hand over the stops that were asked for by `heard_until`, as `request_stops` does; returns how many were found.

    One that may not go out is taken back.
    """

    def hand_over(asked: UnsentStop) -> None:
        with database.transaction() as tx:
            run = runs.lock_run(tx, asked.project_id, asked.run_id)
            decision, now = decisions.lock_decision(tx, run.id, asked.id), read_time(tx)
            if decision.handed_over_at is not None or not decision.is_requested:
                return
            if not hand_overs.try_hand_over(tx, run, decision, asked.asked_by or "", now):
                holds.withdraw_stop(tx, run, decision, now)

    with database.reading() as tx:
        asked = hand_overs.list_asked(tx, heard_until, MOST_AT_ONCE)
    handle_each(asked, hand_over)
    return len(asked)


def _reopen_windows(tx: Transaction, now: datetime, project_ids: Collection[UUID] | None) -> int:
    """Have the requested stops that nobody was handed wait for another window; returns their number."""
    unsent = [
        stop
        for stop in hand_overs.list_requested(tx)
        if stop.window_seconds > 0 and (project_ids is None or stop.project_id in project_ids)
    ]
    for stop in unsent:
        run = runs.lock_run(tx, stop.project_id, stop.run_id)
        until = now + timedelta(seconds=min(EXTENSION_SECONDS, stop.window_seconds))
        decision = decisions.lock_decision(tx, run.id, stop.id)
        transitions.move_decision(tx, run, decision, WindowReopened(now, until, REASON))
    return len(unsent)

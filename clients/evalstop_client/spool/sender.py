"""Sends the spool to the service, for as long as it takes."""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evalstop_client.latest_answer import ENDED
from evalstop_client.service import Accepted, Answer, Json, Refused, Service, Unauthorized, Unavailable, wait_seconds
from evalstop_client.settings import Limits
from evalstop_client.spool import run_log
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Entry, merge_observations, split_rejected
from evalstop_client.spool.spool import Spool

logger = logging.getLogger("evalstop_client")

FLUSH_RETRY_SECONDS = 0.5


class Sender:
    """The sending thread.

    `latest_answer`: the service's answers about the run, with the newest value of each field; empty before the first.
    `accepted_at`: when it last accepted an entry, by the monotonic clock.
    `is_unauthorized`: the key was refused, so that waiting is useless.
    """

    def __init__(
        self, service: Service, spool: Spool, opening: Mapping[str, Any], limits: Limits, warnings: WarningLog
    ) -> None:
        self._service = service
        self._spool = spool
        self._opening = opening
        self._limits = limits
        self._warnings = warnings
        self._current = opening  # of the run that is being opened or posted to
        self._opened: dict[str, str | Refused] = {}  # by opening: the run's id, or why the service refuses it
        self._reopened = False  # because the service no longer knew the run
        self._failures = 0
        self._adopted_at = -math.inf  # when it last looked for the segments of dead processes
        self.accepted_at = -math.inf
        self.is_unauthorized = False
        self._flush_started_at = -math.inf
        self._flushing = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evalstop-sender", daemon=True)
        self.latest_answer: Json = {}

    def start(self) -> None:
        self._thread.start()

    def start_flush(self) -> None:
        """A flush has started: retry immediately and often."""
        self._flush_started_at = time.monotonic()
        self.is_unauthorized = False
        self._flushing.set()
        self._spool.wake()

    def end_flush(self) -> None:
        self._flushing.clear()

    def close(self) -> None:
        """End the thread after its current request."""
        self._closed.set()
        self._flushing.set()
        self._spool.wake()

    @property
    def is_idle(self) -> bool:
        """Whether the run is open (or refused) and nothing is left to send, not even by forked children that died."""
        return self._find_opened(self._opening) is not None and self._spool.is_empty and not self._must_adopt

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                if self._must_adopt or began - self._adopted_at >= self._limits.poll_seconds:
                    self._adopt()
                answer = self._send_next()
            except Exception as error:  # a bug must not end the thread: the spool keeps unsent entries
                if not self._failures:
                    logger.exception("evalstop: internal error in the sender")
                answer = Unavailable(f"{type(error).__name__}: {error}")
            self._pause_after(answer, began)
        self._service.close()

    def _send_next(self) -> Answer | None:
        """Send the next batch; None if there was nothing to send.

        Earlier runs are opened before the trainer's, so that the service numbers runs of one name by their age.
        """
        batch = self._spool.head()
        openings = [*self._spool.list_earlier_openings(), self._opening if batch is None else batch.segment.opening]
        for self._current in openings:
            if self._find_opened(self._current) is None:
                return self._open_run(self._current)
        opened = self._opened[_key_of(self._current)]
        if batch is None:
            return self._wait_or_send_heartbeat(opened)
        if not batch.entries:  # damaged lines only
            self._spool.advance(batch)
            return None
        if batch.entries[0].to == "finish" and self._adopt():  # after its end the run accepts nothing
            return None
        if isinstance(opened, Refused):
            self._reject_entries(batch.entries, opened)
            self._spool.advance(batch)
            return None
        answer = self._send_entry(opened, _merge_entries(batch.entries))
        if isinstance(answer, Accepted):
            self._spool.advance(batch)
        return answer

    def _adopt(self) -> int:
        """Adopt what dead processes left, among them forked children that were killed; returns how many segments."""
        began = time.monotonic()
        adopted = self._spool.adopt()
        self._adopted_at = began
        return adopted

    @property
    def _must_adopt(self) -> bool:
        return self._adopted_at < self._flush_started_at or self._adopted_at == -math.inf

    def _open_run(self, opening: Mapping[str, Any]) -> Answer:
        answer = self._service.post("/runs", dict(opening))
        if isinstance(answer, Accepted):
            if "id" not in answer.body:
                return Unavailable(f"POST /runs answered without a run: {answer.body!r:.200}")
            self._opened[_key_of(opening)] = answer.body["id"]
            self._update_latest_answer(answer.body)
            if self._is_own:
                run_log.describe_opening(self.latest_answer, self._warnings)
            if self._is_renamed:
                self._warnings.warn_once(
                    "renamed",
                    "a run %r exists, which has ended or belongs to another job: this run is called %r; to continue "
                    'the other one, open it with resume="allow"',
                    opening["name"],
                    self.latest_answer["name"],
                )
        elif isinstance(answer, Refused) and answer.code == "other_project" and opening != self._opening:
            self._warnings.warn_once(
                "other project",
                "unsent data of an earlier run %r was logged with a key of another project and is left in place: the "
                "next run of this name with a key of that project sends it",
                opening.get("name"),
            )
            self._spool.leave(opening)
        elif isinstance(answer, Refused):
            self._opened[_key_of(opening)] = answer
            self._spool.wake()
            self._warnings.warn_once(
                f"open {opening}", "the run is NOT being watched; %s", answer.reason, level=logging.ERROR
            )
        return answer

    def _find_opened(self, opening: Mapping[str, Any]) -> str | Refused | None:
        return self._opened.get(_key_of(opening))

    def _send_entry(self, run_id: str, entry: Entry) -> Answer:
        """Post `entry`; parts that the service refuses are rejected, and the rest is posted again."""
        waiting = [entry]
        while waiting:
            part = waiting.pop()
            answer = self._service.post(f"/runs/{run_id}/{part.to}", dict(part.body))
            if isinstance(answer, Accepted):
                self._reopened = False
                self.accepted_at = time.monotonic()
                self._update_latest_answer(answer.body)
                if part.to != "finish":
                    self._say_if_ended()
                elif self._is_own:
                    run_log.warn_of_end(answer.body, self._warnings)
            elif isinstance(answer, Refused):
                if answer.status == 404 and not self._reopened:  # the service does not know the run: reopen it, once
                    del self._opened[_key_of(self._current)]
                    self._reopened = True
                    return answer
                if part.to == "exploited":
                    text = "the copy of another run is not recorded, although it may be loaded: %s"
                    self._warnings.warn_once(f"exploited {part.body}", text, answer.reason, level=logging.ERROR)
                bad, valid = split_rejected(part, answer)
                if bad is not None:
                    self._reject_entries([bad], answer)
                waiting.extend(reversed(valid))
            else:
                return answer  # everything is sent again; accepted observations become duplicates
        return Accepted({})

    def _reject_entries(self, entries: Sequence[Entry], refused: Refused) -> None:
        count = sum(max(1, entry.observation_count) for entry in entries)
        self._warnings.count_dropped("refused", count, "the service refused data: %s", refused.reason)

    def _wait_or_send_heartbeat(self, opened: str | Refused) -> Answer | None:
        def has_work() -> bool:
            return not self._spool.is_empty or self._closed.is_set() or self._must_adopt

        self._spool.wake()  # wakes a waiting flush
        if self._spool.wait(has_work, self._limits.poll_seconds) or isinstance(opened, Refused):
            return None
        answer = self._service.post(f"/runs/{opened}/heartbeat", {})  # its answer also tells whether to stop
        if isinstance(answer, Accepted):
            self._update_latest_answer(answer.body)
            self._say_if_ended()
        elif isinstance(answer, Refused) and answer.status == 404:  # the service does not know the run: reopen it
            del self._opened[_key_of(self._opening)]
        return answer

    @property
    def _is_own(self) -> bool:
        """Whether the current run is the trainer's, not an earlier one with unsent data in the spool."""
        return self._current == self._opening

    @property
    def _is_renamed(self) -> bool:
        is_new = self._is_own and "resume" not in self._opening
        return is_new and self.latest_answer.get("name", self._opening["name"]) != self._opening["name"]

    def _say_if_ended(self) -> None:
        latest = self.latest_answer
        if self._is_own and latest.get("status") in ENDED and not latest.get("should_stop"):
            self._warnings.warn_once(
                "ended",
                "the run %r has ended (%s), and nothing stops it any more: start a new Run, or open it with "
                'resume="allow" to continue it',
                latest["name"],
                latest["status"],
                level=logging.ERROR,
            )

    def _update_latest_answer(self, body: Json) -> None:
        if not self._is_own:
            return
        before, after = self.latest_answer, self.latest_answer | body
        page = body.get("url") or before.get("url")  # without EVALSTOP_PUBLIC_URL the service has none
        self.latest_answer = after | {"url": page or self._service.page_of(after["id"])}
        run_log.describe_change(before, self.latest_answer)
        run_log.warn_of_metrics(self.latest_answer, self._warnings, declared="metrics" in self._opening)
        if conflicts := body.get("conflicts"):
            self._warnings.warn_once(
                "conflict", "a step was logged twice with different values; the first stands: %s", conflicts[0]
            )

    def _pause_after(self, answer: Answer | None, began: float) -> None:
        # A request from before the flush does not show whether the key is accepted now.
        self.is_unauthorized = isinstance(answer, Unauthorized) and began >= self._flush_started_at
        if isinstance(answer, Unauthorized):
            self._warnings.warn_once(
                "unauthorized", "the key (EVALSTOP_KEY) is not accepted; spooling until it is: %s", answer.reason
            )
            self._spool.wake()
            self._pause(self._limits.unauthorized_seconds)
        elif isinstance(answer, Unavailable):
            self._failures += 1
            self._warnings.warn_once("away", "the service is unavailable; spooling until it is back: %s", answer.reason)
            self._pause(wait_seconds(self._failures, random.random(), answer.retry_after_seconds))
        elif answer is not None:
            if self._failures:
                logger.warning("evalstop: the service is back")
            self._failures = 0
            self._warnings.reset("away")
            self._warnings.reset("unauthorized")

    def _pause(self, seconds: float) -> None:
        began = time.monotonic()
        if self._flushing.wait(seconds):
            remaining_seconds = seconds - (time.monotonic() - began)
            self._closed.wait(max(0.0, min(remaining_seconds, FLUSH_RETRY_SECONDS)))


def _key_of(opening: Mapping[str, Any]) -> str:
    return json.dumps(opening, sort_keys=True)


def _merge_entries(entries: Sequence[Entry]) -> Entry:
    """Merge the observations of all `entries`; an entry of another kind is always alone."""
    if len(entries) == 1:
        return entries[0]
    return merge_observations([point for entry in entries for point in entry.body["observations"]])

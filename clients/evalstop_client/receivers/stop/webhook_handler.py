"""Handles one event: verify, drop repeats, answer immediately, stop the job in the background, report back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalstop_client.errors import EventMalformed, RequestRefused, SchedulerUnavailable, SignatureError
from evalstop_client.receivers.stop.execution import Metrics, ReceiverContext, StopExecution, describe_result
from evalstop_client.receivers.stop.job_control import (
    PARK_REQUESTED,
    RESUME_REQUESTED,
    STOP_ESCALATED,
    STOP_REQUESTED,
    StopRequest,
    parse_event,
    parse_stop_request,
)
from evalstop_client.receivers.stop.journal import RETENTION_SECONDS, JournalEntry
from evalstop_client.receivers.stop.state_machine import Phase, Stop
from evalstop_client.signature import verify

logger = logging.getLogger("evalstop_client.receivers")


@dataclass(frozen=True)
class Reply:
    """An answer to an event, with the meaning of an HTTP status."""

    status: int
    body: Mapping[str, Any]


IN_PROGRESS = Reply(409, {"error": "The stop is still in progress; retry when it is done."})


class Receiver:
    """Handles events, whether sent or pulled.

    `secrets` is called for every event, so that a secret can be replaced while a job runs for days.
    """

    def __init__(self, context: ReceiverContext, secrets: Callable[[], Sequence[str]]) -> None:
        self.context = context
        self._secrets = secrets
        self._changed = threading.Condition()
        self._executions: dict[str, StopExecution] = {}
        self._has_stopped_a_job = False
        self._is_shutting_down = False

    @property
    def metrics(self) -> Metrics:
        return self.context.metrics

    def start(self) -> None:
        """Continue the stops that an earlier receiver left unfinished."""
        self.context.journal.delete_finished(self.context.clock() - RETENTION_SECONDS)
        for entry in self.context.journal.list_unfinished():
            logger.info("continuing the stop of run %s, which is %s", entry.request.run_name, entry.stop.phase)
            self._start_execution(entry)

    def receive(self, headers: Mapping[str, str], body: bytes, now: float) -> Reply:
        """Verify one event and start what it requests."""
        reply = self._receive_event(headers, body, now)
        self.metrics.add("webhooks_total", f'status="{reply.status}"')
        return reply

    def _receive_event(self, headers: Mapping[str, str], body: bytes, now: float) -> Reply:
        secrets = self._secrets()
        if not secrets:
            return Reply(503, {"error": "The receiver has no secret yet."})
        try:
            webhook_id = verify(secrets, headers, body, now)
            event = parse_event(body)
            if event["type"] not in (STOP_REQUESTED, STOP_ESCALATED, PARK_REQUESTED, RESUME_REQUESTED):
                return Reply(200, {"ignored": event["type"]})
            request = parse_stop_request(webhook_id, event)
        except SignatureError as error:
            logger.warning("an event was rejected: %s", error)
            return Reply(401, {"error": str(error)})
        except EventMalformed as error:
            return Reply(422, {"error": str(error)})
        if event["type"] == RESUME_REQUESTED:
            return self._undo_stop(request)
        return self._begin_stop(request, escalated=event["type"] == STOP_ESCALATED)

    def wait_until_stopped(self, timeout_seconds: float) -> bool:
        """Wait until a job of this receiver was stopped; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_stopped_a_job, timeout_seconds)

    def wait_idle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no stop is being carried out or reported; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._executions, timeout_seconds)

    def shut_down(self, timeout_seconds: float) -> bool:
        """Accept no more stops and leave unfinished ones to the next receiver; False on timeout."""
        with self._changed:
            self._is_shutting_down = True
            executions = list(self._executions.values())
        for execution in executions:
            execution.interrupt()
        return self.wait_idle(timeout_seconds)

    def _begin_stop(self, request: StopRequest, escalated: bool) -> Reply:
        with self._changed:  # a stop in the journal has its execution, which an escalation or `shut_down` finds
            if self._is_shutting_down:
                return Reply(503, {"error": "The receiver is shutting down; the next one will handle it."})
            try:
                entry = self.context.journal.begin_stop(request, self.context.clock())
            except OSError as error:
                logger.error("cannot write a stop to the journal, so it is not started: %s", error)
                return Reply(503, {"error": f"The receiver cannot write to its journal: {error}"})
            if entry is not None:
                verb = "park" if request.parks else "stop"
                logger.info(
                    "received a request to %s run %s (decision %s)", verb, request.run_name, request.decision_id
                )
                self._start_execution(entry)
            execution = self._executions.get(request.decision_id)
        if entry is not None:
            self.context.journal.delete_finished(self.context.clock() - RETENTION_SECONDS)
            return Reply(202, {"accepted": request.decision_id})
        if escalated and execution is not None:
            execution.escalate()
            return Reply(202, {"escalated": request.decision_id})
        return Reply(200, {"repeat": request.decision_id})

    def _start_execution(self, entry: JournalEntry) -> None:
        decision_id = entry.request.decision_id
        execution = StopExecution(entry, self.context, self._notify_waiters)
        with self._changed:
            self._executions[decision_id] = execution
            self.metrics.add("stops_under_way")
        threading.Thread(
            target=self._run_stop, args=(decision_id, execution), name=f"stop {decision_id}", daemon=True
        ).start()

    def _run_stop(self, decision_id: str, execution: StopExecution) -> None:
        try:
            stop = execution.run()
            if stop.phase is Phase.DONE:
                result = describe_result(stop)
                self.metrics.add("stops_total", f'result="{result}"')
                if result == "confirmed" and stop.reporting_at is not None:
                    self.metrics.add("stop_seconds_total", amount=stop.reporting_at - stop.started_at)
        finally:
            with self._changed:
                if self._executions.get(decision_id) is execution:  # else it was started again meanwhile
                    del self._executions[decision_id]
                self.metrics.add("stops_under_way", amount=-1)
                self._changed.notify_all()

    def _notify_waiters(self, stop: Stop) -> None:
        if stop.is_ours and stop.phase in (Phase.REPORTING, Phase.DONE):
            with self._changed:
                self._has_stopped_a_job = True
                self._changed.notify_all()

    def _undo_stop(self, request: StopRequest) -> Reply:
        """Resume a stopped job while the sender waits; the sender retries failures.

        A stop that is still in progress is dropped if its job was not cancelled yet, and otherwise ends without a kill.
        One that is unknown is remembered, since its request may still be on its way.
        """
        entry = self.context.journal.find_entry(request.decision_id)
        if entry is not None and entry.stop.resumed_at is not None:
            return Reply(200, {"repeat": request.decision_id})
        if entry is not None and entry.stop.phase is not Phase.DONE:
            with self._changed:
                execution = self._executions.get(request.decision_id)
            if execution is not None:
                execution.take_back()
            return IN_PROGRESS
        job = None if entry is None else entry.stop.job
        try:
            if job is not None:
                self.context.job_control.resume_job(job)
            if not self.context.journal.record_resume(request, self.context.clock()):
                return IN_PROGRESS
        except RequestRefused as error:
            return Reply(422, {"error": error.detail or str(error)})
        except (SchedulerUnavailable, OSError) as error:
            return Reply(503, {"error": str(error)})
        if job is None:
            return Reply(200, {"unknown": request.decision_id})
        logger.info("run %s was resumed (decision %s)", request.run_name, request.decision_id)
        return Reply(202, {"undone": request.decision_id})

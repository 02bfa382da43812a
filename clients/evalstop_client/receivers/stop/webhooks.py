"""The receiver's way in: an HTTP server, and how an event is handled.

Verify, drop repeats, answer immediately, stop the job in the background, report back.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evalstop_client.errors import EventMalformed, RequestRefused, SchedulerUnavailable, SignatureError
from evalstop_client.receivers.stop.execution import ReceiverContext, StopExecution
from evalstop_client.receivers.stop.job_control import (
    EXPLOIT_REQUESTED,
    PARK_REQUESTED,
    RESUME_REQUESTED,
    STOP_ESCALATED,
    STOP_REQUESTED,
    StopRequest,
    parse_event,
    parse_stop_request,
)
from evalstop_client.receivers.stop.journal import RETENTION_SECONDS, JournalEntry
from evalstop_client.receivers.stop.state_machine import Phase
from evalstop_client.signature import verify
from evalstop_client.version import __version__

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
        self.resuming = threading.Lock()
        """Held while a parked job is resumed, or let run or set aside without the service."""
        self._changed = threading.Condition()
        self._executions: dict[str, StopExecution] = {}
        self._is_shutting_down = False

    def start(self) -> None:
        """Continue the stops that an earlier receiver left unfinished."""
        self.context.journal.delete_finished(self.context.clock() - RETENTION_SECONDS)
        for entry in self.context.journal.list_unfinished():
            logger.info("continuing the stop of run %s, which is %s", entry.request.run_name, entry.stop.phase)
            self._start_execution(entry)

    def receive(self, headers: Mapping[str, str], body: bytes, now: float) -> Reply:
        """Verify one event and start what it requests."""
        secrets = self._secrets()
        if not secrets:
            return Reply(503, {"error": "The receiver has no secret yet."})
        try:
            webhook_id = verify(secrets, headers, body, now)
            event = parse_event(body)
            known = (STOP_REQUESTED, STOP_ESCALATED, PARK_REQUESTED, RESUME_REQUESTED, EXPLOIT_REQUESTED)
            if event["type"] not in known:
                return Reply(200, {"ignored": event["type"]})
            request = parse_stop_request(webhook_id, event)
            if event["type"] == EXPLOIT_REQUESTED:
                begins = self.context.job_control.start_copy(request)
                return Reply(202 if begins else 200, {"accepted" if begins else "ignored": request.decision_id})
        except SignatureError as error:
            logger.warning("an event was rejected: %s", error)
            return Reply(401, {"error": str(error)})
        except EventMalformed as error:
            return Reply(422, {"error": str(error)})
        if event["type"] == RESUME_REQUESTED:
            return self._undo_stop(request)
        return self._begin_stop(request, escalated=event["type"] == STOP_ESCALATED)

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
        execution = StopExecution(entry, self.context)
        with self._changed:
            self._executions[decision_id] = execution
        threading.Thread(
            target=self._run_stop, args=(decision_id, execution), name=f"stop {decision_id}", daemon=True
        ).start()

    def _run_stop(self, decision_id: str, execution: StopExecution) -> None:
        try:
            execution.run()
        finally:
            with self._changed:
                if self._executions.get(decision_id) is execution:  # else it was started again meanwhile
                    del self._executions[decision_id]
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
            with self.resuming:
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


BODY_LIMIT_BYTES = 2**20
SHUTDOWN_SECONDS = 0.05
"""How often the server checks for `shutdown`."""


class ReceiverServer(ThreadingHTTPServer):
    """The receiver's HTTP server; a webhook may be posted to any path."""

    daemon_threads = True

    def __init__(self, host: str, port: int, read_seconds: float = 10.0) -> None:
        self.read_seconds = read_seconds
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup, which may be slow and is not needed."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self, receiver: Receiver) -> None:
        """Pass requests to `receiver` from a thread, including those that arrived since the socket was bound."""
        self.receiver = receiver
        threading.Thread(target=self.serve_forever, args=(SHUTDOWN_SECONDS,), name="receiver", daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReceiverServer
    server_version = f"evalstop-receiver/{__version__}"

    def handle(self) -> None:
        """Serve one request; disconnects a sender that has not finished within `read_seconds`."""
        self._deadline = threading.Timer(self.server.read_seconds, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()
        try:
            super().handle()
        except OSError as error:
            logger.info("a sender disconnected: %s", error)
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        if self.path == "/livez":
            self._reply(Reply(200, {"status": "ok"}))
        else:
            self._reply(Reply(404, {"error": "Send webhooks by POST; /livez checks that the receiver runs."}))

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            self._reply(Reply(411, {"error": "The header content-length is required."}))
        elif len(length) > 12 or int(length) > BODY_LIMIT_BYTES:
            self._reply(Reply(413, {"error": f"The body may have at most {BODY_LIMIT_BYTES} bytes."}))
        else:
            body = self.rfile.read(int(length))
            self._deadline.cancel()
            if len(body) == int(length):  # else the sender disconnected midway
                self._reply(self.server.receiver.receive(dict(self.headers.items()), body, time.time()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name in the standard library
        logger.debug("%s %s", self.address_string(), format % args)

    def _reply(self, reply: Reply) -> None:
        body = json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _hang_up(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a slow sender had already disconnected")

"""Runs a receiver until it is told to stop: it listens for webhooks, or fetches the events of a pull endpoint."""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.execution import Metrics, ReceiverContext, ReportClient, start_key_check
from evalstop_client.receivers.stop.job_control import JobControl
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.options import (
    choose_state_folder,
    listen,
    load_secrets,
    parse_service,
    parse_timeouts,
    write_atomically,
)
from evalstop_client.receivers.stop.processes import ShutdownSignal, forbid_tracing
from evalstop_client.receivers.stop.state_machine import StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver, ReceiverServer
from evalstop_client.service import Accepted, Json, Refused, Service, seconds_after

logger = logging.getLogger("evalstop_client.receivers")

EMPTY_SECONDS = 0.1  # after an empty poll, so that a service that does not wait is not polled in a tight loop


class Puller:
    """Long-polls one pull endpoint and passes each event to the receiver, as if it had been posted.

    An event is settled once the receiver has answered, which is after it is journaled: if a receiver dies, its claimed
    events come again when the claim expires.
    """

    def __init__(
        self, url: str, key: str | None, endpoint_id: str, receiver: Receiver, poll_seconds: float = 25.0
    ) -> None:
        self._service = Service(url, key, timeout_seconds=poll_seconds + 15.0)
        self._path = f"/pull/endpoints/{quote(endpoint_id, safe='')}"
        self._receiver = receiver
        self._poll_seconds = poll_seconds
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="puller", daemon=True).start()

    def end(self) -> None:
        """Start no further poll; does not interrupt a waiting one."""
        self._ended.set()

    def run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            claim = {"wait_seconds": self._poll_seconds, "limit": 10, "lease_seconds": 30}
            answer = self._service.post(f"{self._path}/claim", claim)
            answered = isinstance(answer, Accepted)
            self._receiver.metrics.add("polls_total", f'answered="{"yes" if answered else "no"}"')
            if isinstance(answer, Accepted):
                if failures:
                    logger.info("the service answers again")
                failures = 0
                events = answer.body.get("events")
                for event in events if isinstance(events, list) else []:
                    self._handle_event(event)
                if not events:
                    self._ended.wait(EMPTY_SECONDS)
                continue
            failures += 1
            if failures == 1:
                logger.warning("events cannot be fetched, retrying: %s", answer.reason)
            self._ended.wait(seconds_after(answer, failures))

    def _handle_event(self, event: Json) -> None:
        if self._ended.is_set():
            return  # left to the next receiver
        try:
            headers, body = event["headers"], event["body"].encode()
            claim: dict[str, Any] = {"delivery_id": event["delivery_id"], "attempt": event["attempt"]}
        except (KeyError, TypeError, AttributeError) as error:
            logger.error("the service returned a malformed event: %s %s", type(error).__name__, error)
            return
        try:
            reply = self._receiver.receive(headers, body, time.time())
        except Exception:  # any error: the next event must not be lost; this one comes again
            logger.exception("an event could not be handled")
            return
        detail = str(reply.body.get("error", ""))[:300] if reply.status >= 300 else ""
        answer = self._service.post(f"{self._path}/settle", {**claim, "status": reply.status, "error": detail})
        if isinstance(answer, Refused):
            logger.error("the service does not accept the settlement: %s", answer.reason)


logger = logging.getLogger("evalstop_client.receivers")

SHUTDOWN_SECONDS = 20.0
DEFAULT_ADDRESS = "127.0.0.1:9000"


def run_receiver(job_control: JobControl, options: argparse.Namespace, scheduler: str) -> int:
    """Receive or pull until SIGTERM or SIGINT; unfinished stops continue at the next start."""
    forbid_tracing()
    url, key = parse_service(options)
    secrets = load_secrets(options.secret_env, options.secret_file, options.public_key)
    if options.pull and url is None:
        raise ConfigurationError("pull: name the service with --url or EVALSTOP_URL.")
    address = options.listen or (None if options.pull else DEFAULT_ADDRESS)
    shutdown = ShutdownSignal()
    journal = _open_journal(options, scheduler)
    server = listen(address, options) if address else None
    receiver = start_receiver(job_control, journal, parse_timeouts(options), (url, key), secrets, server)
    puller = Puller(url, key, options.pull, receiver) if options.pull and url is not None else None
    if puller is not None:
        puller.start()
        logger.info("fetching events from %s", url)
    write_ready_file(options, server, {"pid": os.getpid()})
    shutdown.wait()
    logger.info("shutting down; unfinished stops continue at the next start")
    if puller is not None:
        puller.end()
    if server is not None:
        server.shutdown()
    receiver.shut_down(SHUTDOWN_SECONDS)
    journal.close()
    return 0


def start_receiver(
    job_control: JobControl,
    journal: Journal,
    timeouts: StopTimeouts,
    service: tuple[str | None, str | None],
    secrets: Callable[[], Sequence[str]],
    server: ReceiverServer | None,
) -> Receiver:
    """Continue what the journal holds, and handle what `server` receives; `service`: the URL and key for reports."""
    context = ReceiverContext(
        job_control, journal, lambda: ReportClient(*service, job_control.name), timeouts, Metrics()
    )
    receiver = Receiver(context, secrets)
    receiver.start()
    start_key_check(context.open_report_client)
    if server is not None:
        server.serve(receiver)
        logger.info("listening on %s", server.url)
    return receiver


def write_ready_file(options: argparse.Namespace, server: ReceiverServer | None, facts: dict[str, object]) -> None:
    """Tell with --ready-file that the receiver is ready: its address, and these facts."""
    if options.ready_file:
        if server is not None:
            host, port = server.server_address[:2]
            facts |= {"url": server.url, "host": host, "port": port}
        write_atomically(options.ready_file, json.dumps(facts) + "\n")


def _open_journal(options: argparse.Namespace, scheduler: str) -> Journal:
    folder = choose_state_folder(options.state, scheduler)
    try:
        return Journal(folder)
    except OSError as error:
        raise ConfigurationError(f"state {folder}: {error}; name another folder with --state.") from None

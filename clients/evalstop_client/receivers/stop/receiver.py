"""Runs a receiver beside a scheduler until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import json
import logging
import os

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.http_server import ReceiverServer
from evalstop_client.receivers.stop.job_control import JobControl
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.options import (
    choose_state_folder,
    listen,
    load_secrets,
    parse_service,
    parse_timeouts,
    write_atomically,
)
from evalstop_client.receivers.stop.pull import Puller
from evalstop_client.receivers.stop.report import ReportClient, start_key_check
from evalstop_client.receivers.stop.signals import ShutdownSignal
from evalstop_client.receivers.stop.tracing import forbid_tracing
from evalstop_client.receivers.stop.webhook_handler import Receiver

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
    context = ReceiverContext(
        job_control=job_control,
        journal=journal,
        open_report_client=lambda: ReportClient(url, key, job_control.name),
        timeouts=parse_timeouts(options),
        metrics=Metrics(),
    )
    receiver = Receiver(context, secrets)
    receiver.start()
    start_key_check(context.open_report_client)
    if server is not None:
        server.serve(receiver)
        logger.info("listening on %s", server.url)
    puller = Puller(url, key, options.pull, receiver) if options.pull and url is not None else None
    if puller is not None:
        puller.start()
        logger.info("fetching events from %s", url)
    if options.ready_file:
        write_atomically(options.ready_file, json.dumps(_describe_address(server)) + "\n")
    shutdown.wait()
    logger.info("shutting down; unfinished stops continue at the next start")
    if puller is not None:
        puller.end()
    if server is not None:
        server.shutdown()
    receiver.shut_down(SHUTDOWN_SECONDS)
    journal.close()
    return 0


def _open_journal(options: argparse.Namespace, scheduler: str) -> Journal:
    folder = choose_state_folder(options.state, scheduler)
    try:
        return Journal(folder)
    except OSError as error:
        raise ConfigurationError(f"state {folder}: {error}; name another folder with --state.") from None


def _describe_address(server: ReceiverServer | None) -> dict[str, object]:
    ready: dict[str, object] = {"pid": os.getpid()}
    if server is not None:
        host, port = server.server_address[:2]
        ready |= {"url": server.url, "host": host, "port": port}
    return ready

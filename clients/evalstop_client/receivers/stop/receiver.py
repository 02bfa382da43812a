"""Runs a receiver that stands beside a scheduler, until it is told to end."""

from __future__ import annotations

import argparse
import json
import logging
import os

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.action import Action
from evalstop_client.receivers.stop.execution import Surroundings
from evalstop_client.receivers.stop.http_server import ReceiverServer
from evalstop_client.receivers.stop.journal import Memory
from evalstop_client.receivers.stop.metrics import Metrics
from evalstop_client.receivers.stop.options import (
    bounds_of,
    listen,
    secrets_from,
    service_of,
    state_folder,
    write_whole,
)
from evalstop_client.receivers.stop.pull import Puller
from evalstop_client.receivers.stop.report import Reports
from evalstop_client.receivers.stop.signals import Ending
from evalstop_client.receivers.stop.webhook_handler import Receiver

logger = logging.getLogger("evalstop_client.receivers")

LEAVE_SECONDS = 20.0
DEFAULT_ADDRESS = "127.0.0.1:9000"


def stand(action: Action, options: argparse.Namespace, scheduler: str) -> int:
    """Receive, or pull, until SIGTERM or SIGINT; what is under way then is gone on with at the next start."""
    url, key = service_of(options)
    secrets = secrets_from(options.secret_env, options.secret_file)
    if options.pull and url is None:
        raise ConfigurationError("pull: say where the service is, with --url or EVALSTOP_URL.")
    address = options.listen or (None if options.pull else DEFAULT_ADDRESS)
    ending = Ending()
    memory = _memory(options, scheduler)
    server = listen(address) if address else None
    surroundings = Surroundings(
        action=action,
        memory=memory,
        reports=lambda: Reports(url, key, action.name),
        bounds=bounds_of(options),
        metrics=Metrics(),
    )
    receiver = Receiver(surroundings, secrets)
    receiver.start()
    if server is not None:
        server.serve(receiver)
        logger.info("listening on %s", server.url)
    puller = Puller(url, key, options.pull, receiver) if options.pull and url is not None else None
    if puller is not None:
        puller.start()
        logger.info("fetching events from %s", url)
    if options.ready_file:
        write_whole(options.ready_file, json.dumps(_ready(server)) + "\n")
    ending.wait()
    logger.info("going down; what is under way is gone on with at the next start")
    if puller is not None:
        puller.end()
    if server is not None:
        server.shutdown()
    receiver.leave(LEAVE_SECONDS)
    memory.close()
    return 0


def _memory(options: argparse.Namespace, scheduler: str) -> Memory:
    folder = state_folder(options.state, scheduler)
    try:
        return Memory(folder)
    except OSError as error:
        raise ConfigurationError(f"state {folder}: {error}; name another folder with --state.") from None


def _ready(server: ReceiverServer | None) -> dict[str, object]:
    ready: dict[str, object] = {"pid": os.getpid()}
    if server is not None:
        host, port = server.server_address[:2]
        ready |= {"url": server.url, "host": host, "port": port}
    return ready

"""Runs a receiver until it is told to stop: its options, how it gets its events, and idle returns of parked jobs."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.execution import ReceiverContext, ReportClient
from evalstop_client.receivers.stop.job_control import Job, JobControl, Parked, Present
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.processes import POLL_SECONDS, exit_on_signals, forbid_tracing, ignore_signals
from evalstop_client.receivers.stop.state_machine import StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver, ReceiverServer
from evalstop_client.service import Accepted, Answer, Json, Refused, Service, seconds_after
from evalstop_client.settings import find_state_folder, validate_key, validate_url
from evalstop_client.signature import check_secret, parse_secret

logger = logging.getLogger("evalstop_client.receivers")

EMPTY_SECONDS = 0.1  # after an empty poll, so that a service that does not wait is not polled in a tight loop


def read_answers(ask: Callable[[], Answer], ended: threading.Event, what: str) -> Iterator[Json]:
    """What the service answers, again and again until `ended` is set; it is asked less often while it does not."""
    failures = 0
    while not ended.is_set():
        answer = ask()
        if isinstance(answer, Accepted):
            if failures:
                logger.info("the service answers again")
            failures = 0
            yield answer.body
            continue
        failures += 1
        if failures == 1:
            logger.warning("%s cannot be fetched, retrying: %s", what, answer.reason)
        ended.wait(seconds_after(answer, failures))


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
        for body in read_answers(self._claim_events, self._ended, "events"):
            events = body.get("events")
            for event in events if isinstance(events, list) else []:
                self._handle_event(event)
            if not events:
                self._ended.wait(EMPTY_SECONDS)

    def _claim_events(self) -> Answer:
        claim = {"wait_seconds": self._poll_seconds, "limit": 10, "lease_seconds": 30}
        return self._service.post(f"{self._path}/claim", claim)

    def _handle_event(self, event: Json) -> None:
        if self._ended.is_set():
            return  # left to the next receiver
        try:
            claim = {"delivery_id": event["delivery_id"], "attempt": event["attempt"]}
            reply = self._receiver.receive(event["headers"], event["body"].encode(), time.time())
        except Exception:  # any error: the next event must not be lost; this one comes again
            logger.exception("an event could not be handled")
            return
        detail = str(reply.body.get("error", ""))[:300] if reply.status >= 300 else ""
        answer = self._service.post(f"{self._path}/settle", {**claim, "status": reply.status, "error": detail})
        if isinstance(answer, Refused):
            logger.error("the service does not accept the settlement: %s", answer.reason)


LOOK_POLLS = 30.0
"""Polls from one look at the parked jobs to the next: a look asks for the whole queue."""


class IdleReturns:
    """Lets parked jobs run while nobody waits for their GPUs, and sets them aside again, each `most` times.

    The service is told nothing: the run stays parked, its evals count, and the decision is taken back once one of them
    is no longer suspect. Where the job fits, and when, is left to its scheduler.
    """

    def __init__(self, receiver: Receiver, most: int) -> None:
        self._receiver = receiver
        self._most = most

    def run(self) -> None:
        """Look again and again, until the process ends."""
        while True:
            time.sleep(LOOK_POLLS * self._receiver.context.timeouts.poll_seconds)
            self.look()

    def look(self) -> None:
        """Let parked jobs run that are in nobody's way, and set those aside that are."""
        entries = self._receiver.context.journal.list_parked()
        parked = {entry.request.decision_id: entry.stop.job for entry in entries if entry.stop.job is not None}
        for decision_id, job in parked.items():
            try:
                with self._receiver.resuming:  # a job that a person resumes meanwhile must not be set aside
                    self._look_at(decision_id, job, parked.values())
            except (RequestRefused, SchedulerUnavailable) as error:
                logger.info("job %s, which is parked: %s", job.id, error.detail or error)
            except Exception:  # any error: the other jobs, and the next look
                logger.exception("job %s, which is parked, could not be looked at", job.id)

    def _look_at(self, decision_id: str, job: Job, parked: Collection[Job]) -> None:
        journal, job_control = self._receiver.context.journal, self._receiver.context.job_control
        entry = journal.find_entry(decision_id)
        if entry is None or not entry.stop.is_parked:
            return
        state = job_control.check_parked(job)
        may_return = isinstance(state, Parked) and entry.stop.idle_returns < self._most
        if may_return and not job_control.others_wait(job, parked):
            job_control.resume_job(job)
            logger.info("job %s, which is parked, may run while nobody waits", job.id)
        elif isinstance(state, Present) and job_control.others_wait(job, parked):
            if state.runs:  # counted first: it rather runs once less than once more, if the receiver dies in between
                journal.count_idle_return(decision_id)
            job_control.park_job(job, entry.request)
            logger.info("job %s is set aside again, since others wait", job.id)


SHUTDOWN_SECONDS = 20.0
DEFAULT_ADDRESS = "127.0.0.1:9000"


def run_receiver(job_control: JobControl, options: argparse.Namespace, scheduler: str, return_idle: int = 0) -> int:
    """Receive or pull until SIGTERM or SIGINT; unfinished stops continue at the next start.

    `return_idle`: how often a parked job may run while nobody waits, and be set aside again.
    """
    forbid_tracing()
    url, key = parse_service(options)
    secrets = load_secrets(options.secret_env, options.secret_file, options.public_key)
    address = options.listen or (None if options.pull else DEFAULT_ADDRESS)
    exit_on_signals()
    folder = choose_state_folder(options.state, scheduler)
    try:
        journal = Journal(folder)
    except OSError as error:
        raise ConfigurationError(f"state {folder}: {error}; name another folder with --state.") from None
    server = listen(address) if address else None
    receiver = start_receiver(job_control, journal, parse_timeouts(options), (url, key), secrets, server)
    puller = Puller(url, key, options.pull, receiver) if options.pull else None
    if return_idle > 0:
        returns = IdleReturns(receiver, return_idle)
        threading.Thread(target=returns.run, name="idle returns", daemon=True).start()
    if puller is not None:
        puller.start()
        logger.info("fetching events from %s", url)
    write_ready_file(options, server, {"pid": os.getpid()})
    try:
        while True:
            time.sleep(POLL_SECONDS)
    finally:
        ignore_signals()  # a second one would cut short what the first one begins
        logger.info("shutting down; unfinished stops continue at the next start")
        if puller is not None:
            puller.end()
        if server is not None:
            server.shutdown()
        receiver.shut_down(SHUTDOWN_SECONDS)
        journal.close()


def start_receiver(
    job_control: JobControl,
    journal: Journal,
    timeouts: StopTimeouts,
    service: tuple[str, str | None],
    secrets: Callable[[], Sequence[str]],
    server: ReceiverServer | None,
) -> Receiver:
    """Continue what the journal holds, and handle what `server` receives; `service`: the URL and key for reports."""
    reports = ReportClient(*service)
    receiver = Receiver(ReceiverContext(job_control, journal, reports, timeouts), secrets)
    receiver.start()
    threading.Thread(target=reports.check_key, name="check-key", daemon=True).start()
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
        draft = options.ready_file.with_name(options.ready_file.name + ".draft")
        draft.write_text(json.dumps(facts) + "\n")
        draft.replace(options.ready_file)


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the service: secrets, URL, key."""
    add = parser.add_argument
    add("--secret-env", default="EVALSTOP_WEBHOOK_SECRET", metavar="NAME", help="variable with the secret(s) whsec_...")
    add("--secret-file", type=Path, metavar="FILE", help="file with the secret(s), read at every webhook")
    add(
        "--public-key",
        action="append",
        default=[],
        metavar="whpk_...",
        help="verify with this public key instead of a secret: a receiver that has only this key cannot forge events",
    )
    add_url_options(parser, "report")
    add("--ready-file", type=Path, metavar="FILE", help="write the address as JSON to FILE once listening")


def add_return_option(parser: argparse.ArgumentParser) -> None:
    text = "how often a parked job may run while nobody waits, and be set aside again (default: 0, never)"
    parser.add_argument("--return-idle", type=int, default=0, metavar="N", help=text)


def add_receiver_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of receivers that run beside a scheduler."""
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="address for webhooks (default: 127.0.0.1:9000, or none with --pull)")
    add(
        "--pull",
        metavar="ENDPOINT_ID",
        help="fetch events from this pull endpoint of the service, for hosts without inbound connections",
    )
    add(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="folder of the journal (default: receiver-<scheduler> in the user's state folder)",
    )
    to_cancel = "time for a checkpoint, from the signal to the cancel; 0 cancels immediately"
    add_seconds(parser, "--checkpoint-grace-seconds", StopTimeouts.checkpoint_seconds, to_cancel)
    to_kill = "time from the cancel to the kill; longer than the scheduler's grace period"
    add_seconds(parser, "--grace-seconds", StopTimeouts.cancel_seconds, to_kill)
    to_give_up = "time from the cancel until the stop is reported as failed; polling continues"
    add_seconds(parser, "--give-up-seconds", StopTimeouts.give_up_seconds, to_give_up)
    add_seconds(parser, "--poll-seconds", StopTimeouts.poll_seconds, "time between two checks of the job")


def add_url_options(parser: argparse.ArgumentParser, scope: str) -> None:
    """Add the options for the service's URL and for a key of this scope."""
    url = os.environ.get("EVALSTOP_URL")
    parser.add_argument("--url", default=url, help="the service to report to (default: $EVALSTOP_URL)")
    key = f"variable with a key of scope {scope} (default: %(default)s)"
    parser.add_argument("--key-env", default="EVALSTOP_KEY", metavar="NAME", help=key)


def add_seconds(parser: argparse.ArgumentParser, option: str, default: float, text: str) -> None:
    text = f"{text} (default: %(default)g)"
    parser.add_argument(option, type=_parse_seconds, default=default, metavar="S", help=text)


def parse_timeouts(options: argparse.Namespace) -> StopTimeouts:
    """How long each part of a stop may take."""
    return StopTimeouts(
        checkpoint_seconds=options.checkpoint_grace_seconds,
        cancel_seconds=options.grace_seconds,
        give_up_seconds=options.give_up_seconds,
        poll_seconds=max(0.05, options.poll_seconds),
    )


def parse_service(options: argparse.Namespace) -> tuple[str, str | None]:
    """The URL of the service, and the key; raises ConfigurationError."""
    if not options.url:
        raise ConfigurationError("url: name the service with --url or EVALSTOP_URL.")
    return validate_url(options.url), validate_key(os.environ.get(options.key_env))


def load_secrets(variable: str, file: Path | None, public_keys: Sequence[str] = ()) -> Callable[[], Sequence[str]]:
    """A function that returns the current public keys, or the secrets in `file` or `variable`, separated by
    whitespace."""
    if public_keys or file is None:
        secrets = public_keys or os.environ.get(variable, "").split()
        if not secrets:
            raise ConfigurationError(
                f"webhook secret: {variable} is not set; or name a file with --secret-file, or a --public-key."
            )
        for secret in secrets:
            check_secret(secret)
        return lambda: secrets

    def read() -> list[str]:
        try:
            secrets = file.read_text().split() or [""]  # an empty one is none
            for secret in secrets:
                parse_secret(secret)
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            logger.error("no secret in %s, so all webhooks are refused: %s", file, error)
            return []
        return secrets

    read()  # logs what is wrong at the start, not at the first stop; the file may still come
    return read


def listen(address: str) -> ReceiverServer:
    """A server for webhooks."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"listen {address!r}: write host:port, such as 127.0.0.1:9000.")
    try:
        return ReceiverServer(host, int(port))
    except OSError as error:
        raise ConfigurationError(f"listen {address!r}: {error}.") from None


def choose_state_folder(chosen: Path | None, scheduler: str) -> Path:
    if chosen is not None:
        return chosen
    state = find_state_folder(os.environ)
    if state is None:
        raise ConfigurationError("state: this user has no home; name a folder with --state.")
    return state / f"receiver-{scheduler}"


def _parse_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: it must be from 0 to 86400 seconds")
    return number

"""`evalstop-receiver process`: runs a job as a child process and ends it when EvalStop requests it.

SIGTERM to its process group, a grace period, SIGKILL to what is left, and a report once all are gone. It exits with the
job's code (128 + N if signal N ended it), with 2 for wrong usage, and with 126 or 127 if the job cannot be started.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Mapping
from types import FrameType

from evalstop_client.errors import ConfigurationError
from evalstop_client.job_identity import scheduler_labels
from evalstop_client.receivers.child_job import LABEL, ChildJob, ProcessJobControl
from evalstop_client.receivers.stop.job_control import parse_checkpoint_signal
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.processes import POLL_SECONDS, adopt_orphans, copy_environment, forbid_tracing
from evalstop_client.receivers.stop.receiver import (
    add_seconds,
    add_service_options,
    listen,
    load_secrets,
    parse_service,
    start_receiver,
    write_ready_file,
)
from evalstop_client.receivers.stop.state_machine import StopTimeouts
from evalstop_client.settings import parse_labels

logger = logging.getLogger("evalstop_client.receivers")

ENDING = (signal.SIGTERM, signal.SIGINT)
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_EXECUTABLE, NOT_FOUND = 126, 127
RUN_CONTEXT = "MLFLOW_RUN_CONTEXT"
KILL_SECONDS = 10.0  # a process that survives SIGKILL this long hangs in the kernel


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="address for webhooks; port 0 picks a free one")
    add_service_options(parser)
    add(
        "--job-key-env",
        metavar="NAME",
        help="variable with the key that the job gets as EVALSTOP_KEY; the job never gets the receiver's key",
    )
    add(
        "--restartable",
        action="store_true",
        help="the command resumes from its last checkpoint when restarted, so the job may be parked",
    )
    add("--checkpoint-signal", metavar="NAME", help="USR1, USR2 or HUP: signal that makes the job save a checkpoint")
    to_sigterm = "time for the checkpoint, from that signal to SIGTERM"
    add_seconds(parser, "--checkpoint-grace-seconds", StopTimeouts.checkpoint_seconds, to_sigterm)
    add_seconds(parser, "--grace-seconds", 30.0, "time from SIGTERM to SIGKILL")
    add_seconds(parser, "--report-seconds", 60.0, "how long to retry reports")
    add_seconds(parser, "--linger-seconds", 2.0, "how long to wait for a late stop event")
    add("command", nargs=argparse.REMAINDER, help="the job, after --")


def run(options: argparse.Namespace) -> int:
    """Run the job to its end and return its exit code."""
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigurationError("command: give the job's command after --, as in: -- python train.py")
    secrets = load_secrets(options.secret_env, options.secret_file, options.public_key)
    url, key = parse_service(options)
    asked = options.checkpoint_signal
    number = None if asked is None else int(getattr(signal, f"SIG{parse_checkpoint_signal(asked).name}"))
    receiver_id = str(uuid.uuid4())
    environment = label_environment(_build_job_environment(options), receiver_id)
    forbid_tracing()
    server = listen(options.listen)  # before the job, which must not start if it cannot be stopped
    forwarding = Forwarding()
    ancestor = os.getpid() if adopt_orphans() else None
    try:
        job = ChildJob(command, environment)
    except OSError as error:
        logger.error("cannot start %s: %s", command[0], error)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    forwarding.to(job)
    control = ProcessJobControl(
        job,
        receiver_id,
        ancestor,
        number,
        (lambda added: forwarding.to(ChildJob(command, environment | added))) if options.restartable else None,
        options.grace_seconds,
    )
    timeouts = _choose_timeouts(options, asks=number is not None)
    journal = Journal(None)  # it lasts as long as its job
    receiver = start_receiver(control, journal, timeouts, (url, key), secrets, server)
    write_ready_file(options, server, {"job_pid": job.pid, "receiver": receiver_id})
    status = await_end(control, forwarding)
    until = time.monotonic() + options.linger_seconds
    while journal.is_empty and not forwarding.is_ending and time.monotonic() < until:
        time.sleep(POLL_SECONDS)  # a job that polls may obey before the webhook arrives
    receiver.wait_idle()
    server.shutdown()
    return status if status >= 0 else 128 - status


def await_end(control: ProcessJobControl, forwarding: Forwarding) -> int:
    """Wait for the job's final exit status; waits for a parked job until it is stopped or a signal arrives."""
    while True:
        job = control.job
        status = job.wait(POLL_SECONDS)  # a signal that arrives just before a wait is handled between two waits
        ends = not control.is_parked or forwarding.is_ending
        if status is not None and ends and control.job is job:  # else it was resumed meanwhile
            return status
        if control.is_parked:
            control.restart_resumed_job()
            time.sleep(POLL_SECONDS)


class Forwarding:
    """Forwards the receiver's signals to the job, also those that arrived before it started.

    A signal that ends the job also ends a restarted job, because it may arrive during the restart.
    """

    def __init__(self) -> None:
        self._job: ChildJob | None = None
        self._waiting: list[int] = []
        self._ending: list[int] = []
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup: the job ignores it as well
                signal.signal(number, self._forward)

    @property
    def is_ending(self) -> bool:
        """Whether a signal that ends the job has arrived."""
        return bool(self._ending)

    def to(self, job: ChildJob) -> ChildJob:
        """Forward signals to `job` from now on; returns it."""
        self._job = job  # first: a signal that arrives now reaches the job here or there, perhaps twice
        for number in (*self._waiting, *self._ending):
            job.signal(number)
        self._waiting.clear()
        return job

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in ENDING:
            self._ending.append(number)
        elif self._job is None:
            self._waiting.append(number)
        if self._job is not None:
            self._job.signal(number)


def label_environment(environment: Mapping[str, str], receiver_id: str) -> dict[str, str]:
    """Add the label to `environment` that identifies runs started in it.

    MLflow's clients set the tags in MLFLOW_RUN_CONTEXT, and so send this label and those of a scheduler.
    """
    labels = {**parse_labels(environment.get("EVALSTOP_LABELS", "")), LABEL: receiver_id}
    tags = {**scheduler_labels(environment), LABEL: receiver_id}
    texts = ",".join(f"{name}={value}" for name, value in labels.items())
    return {**environment, "EVALSTOP_LABELS": texts, RUN_CONTEXT: json.dumps(tags)}


def _choose_timeouts(options: argparse.Namespace, asks: bool) -> StopTimeouts:
    checkpoint_seconds = options.checkpoint_grace_seconds if asks else 0.0
    give_up_seconds = options.grace_seconds + KILL_SECONDS
    return StopTimeouts(
        checkpoint_seconds=checkpoint_seconds,
        cancel_seconds=options.grace_seconds,
        give_up_seconds=give_up_seconds,
        abandon_seconds=checkpoint_seconds + give_up_seconds + max(KILL_SECONDS, options.report_seconds),
        report_seconds=options.report_seconds,
        poll_seconds=0.1,
    )


def _build_job_environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment without the receiver's own variables; EVALSTOP_KEY is the job's key, if any."""
    environment = copy_environment(options.secret_env, options.key_env)
    if options.job_key_env is None:
        return environment
    key = os.environ.get(options.job_key_env)
    if not key:
        raise ConfigurationError(f"job-key-env: {options.job_key_env} is not set.")
    environment.pop(options.job_key_env, None)
    return environment | {"EVALSTOP_KEY": key}

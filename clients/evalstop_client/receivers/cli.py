"""The command `evalstop-receiver`: runs a job and ends it when EvalStop says so."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.app import Receiver, ReceiverServer
from evalstop_client.receivers.descendants import adopt_orphans
from evalstop_client.receivers.process import Job, ProcessAction, marked_environment, new_receiver_id
from evalstop_client.receivers.report import Reports
from evalstop_client.settings import checked_key, checked_url
from evalstop_client.signature import secret_bytes
from evalstop_client.version import __version__

logger = logging.getLogger("evalstop_client.receivers")

FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
ENDING = (signal.SIGTERM, signal.SIGINT)
NOT_EXECUTABLE, NOT_FOUND = 126, 127

EXAMPLES = """\
examples:
  # 1. register the receiver once with the service; the answer shows the secret:
  #    POST /api/v1/endpoints {"url": "http://trainer-host:9000/", "event_types": ["run.stop_requested"]}
  # 2. run the training under the receiver:
  export EVALSTOP_WEBHOOK_SECRET=whsec_... EVALSTOP_URL=http://evalstop:8787 EVALSTOP_KEY=esk_...
  evalstop-receiver process --listen 0.0.0.0:9000 -- python train.py --seed 3

  # a secret in a file is read again at every webhook, so that it can be rotated while the job runs:
  evalstop-receiver process --secret-file /run/secrets/evalstop --grace-seconds 120 -- torchrun train.py

  # let another program find the port:
  evalstop-receiver process --listen 127.0.0.1:0 --ready-file ready.json -- python train.py

The job finds its run by a label: the receiver adds receiver=<id> to EVALSTOP_LABELS in the job's environment,
evalstop_client.Run passes it on, and a stop event that carries another one is left to other receivers.

exit code: that of the job (128 + N when signal N ended it); 2 for wrong usage; 126 or 127 when it cannot be started.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="evalstop-receiver: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return run_process(options)
    except ConfigurationError as error:
        parser.error(str(error))


def run_process(options: argparse.Namespace) -> int:
    """Run the job of `evalstop-receiver process` to its end, whoever brings that about."""
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigurationError("command: say what to run after --, as in: -- python train.py")
    secrets = secrets_from(options.secret_env, options.secret_file)
    url = checked_url(options.url) if options.url else None
    key = checked_key(os.environ.get(options.key_env))
    reports = Reports(url, key, ProcessAction.name, options.report_seconds)
    receiver_id = new_receiver_id()
    environment = marked_environment(_environment_without(options.secret_env, options.key_env), receiver_id)
    server = _listen(options.listen)  # before the job, which must not start if nobody could stop it
    forwarding = Forwarding()
    ancestor = os.getpid() if adopt_orphans() else None
    try:
        job = Job(command, environment)
    except OSError as error:
        logger.error("cannot start %s: %s", command[0], error)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    forwarding.to(job)
    receiver = Receiver(ProcessAction(job, receiver_id, options.grace_seconds, ancestor), secrets, reports)
    server.serve(receiver)
    logger.info("listening on %s for stops of job %d", server.url, job.pid)
    if options.ready_file:
        host, port = server.server_address[:2]
        ready = {"url": server.url, "host": host, "port": port, "job_pid": job.pid, "receiver": receiver_id}
        _write_whole(options.ready_file, json.dumps(ready) + "\n")
    status = job.wait()
    assert status is not None
    if (
        url is not None and not forwarding.happened
    ):  # a job that polls may obey before the webhook is here: the stop gets its report
        receiver.wait_obeyed(options.linger_seconds)
    receiver.wait_idle()
    server.shutdown()
    return status if status >= 0 else 128 - status


class Forwarding:
    """Hands the signals that the receiver gets on to the job, also those that came before there was one."""

    def __init__(self) -> None:
        self.happened = False
        self._job: Job | None = None
        self._waiting: list[int] = []
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has set it: the job ignores it as well
                signal.signal(number, self._forward)

    def to(self, job: Job) -> None:
        """From now on `job` gets them."""
        self._job = job
        for number in self._waiting:
            job.signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.happened = self.happened or number in ENDING
        if self._job is None:
            self._waiting.append(number)
        else:
            self._job.signal(number)


def secrets_from(variable: str, file: Path | None) -> Callable[[], list[str]]:
    """A source of the secrets now valid, one or several with white space between: `file`, else `variable`."""
    if file is None:
        secrets = os.environ.get(variable, "").split()
        if not secrets:
            raise ConfigurationError(f"webhook secret: {variable} is not set; or name a file with --secret-file.")
        for secret in secrets:
            secret_bytes(secret)
        return lambda: secrets

    def read() -> list[str]:
        try:
            return [secret for secret in file.read_text().split() if secret_bytes(secret)]
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            logger.error("no secret in %s: %s", file, error)
            return []

    return read


def _listen(address: str) -> ReceiverServer:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"listen {address!r}: write host:port, such as 127.0.0.1:9000.")
    try:
        return ReceiverServer(host, int(port))
    except OSError as error:
        raise ConfigurationError(f"listen {address!r}: {error}.") from None


def _environment_without(secret_variable: str, key_variable: str) -> dict[str, str]:
    """Our environment less what the job has no use for; EVALSTOP_KEY is the job's own to report with."""
    private = {secret_variable, key_variable} - {"EVALSTOP_KEY"}
    return {name: value for name, value in os.environ.items() if name not in private}


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalstop-receiver",
        description="Stands beside a scheduler, ends jobs when EvalStop asks for it, and reports that they are gone.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="schedulers", required=True, metavar="SCHEDULER")
    process = kinds.add_parser(
        "process",
        help="run a command as a child and end it",
        description="Runs a command as a child, in a process group of its own, and ends it when EvalStop asks for it: "
        "SIGTERM to the group, a period of grace, SIGKILL to whoever is left, and a report once all are gone.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = process.add_argument
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where webhooks arrive; port 0 takes a free one")
    add("--secret-env", default="EVALSTOP_WEBHOOK_SECRET", metavar="NAME", help="variable with the secret(s) whsec_...")
    add("--secret-file", type=Path, metavar="FILE", help="file with the secret(s), read at every webhook")
    add("--url", default=os.environ.get("EVALSTOP_URL"), help="the service to report to (default: $EVALSTOP_URL)")
    add("--key-env", default="EVALSTOP_KEY", metavar="NAME", help="variable with a key of scope operate")
    add("--grace-seconds", type=_seconds, default=30.0, metavar="S", help="from SIGTERM to SIGKILL (default: 30)")
    add("--report-seconds", type=_seconds, default=60.0, metavar="S", help="try to report for so long (default: 60)")
    add("--linger-seconds", type=_seconds, default=2.0, metavar="S", help="wait for a late stop event (default: 2)")
    add("--ready-file", type=Path, metavar="FILE", help="write the address as JSON to FILE once listening")
    add("command", nargs=argparse.REMAINDER, help="the job, after --")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

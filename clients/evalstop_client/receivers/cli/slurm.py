"""`evalstop-receiver slurm`: ends jobs of a Slurm cluster."""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.job_control import Cluster, SlurmJobControl
from evalstop_client.receivers.slurm.rest import Rest, parse_token, validate_rest_url
from evalstop_client.receivers.stop.checkpoint_signal import parse_checkpoint_signal
from evalstop_client.receivers.stop.options import add_receiver_options, add_service_options
from evalstop_client.receivers.stop.processes import copy_environment, run
from evalstop_client.receivers.stop.receiver import run_receiver

TOKEN_SECONDS = 30.0

EXAMPLES = """\
examples:
  # on a login node, for your own jobs; the trainer's client identifies the job
  evalstop-receiver slurm --listen 0.0.0.0:9000 --checkpoint-signal USR1@batch

  # on a host without inbound connections
  evalstop-receiver slurm --pull 01a0... --allow-user ann --allow-user ben --allow-partition gpu

  # through slurmrestd, with a token from a command for each request
  evalstop-receiver slurm --rest http://127.0.0.1:6820 --cluster alpha --token-command 'scontrol token lifespan=60'
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "slurm",
        help="end jobs of a Slurm cluster",
        description="Ends jobs of a Slurm cluster: a signal for the checkpoint, a cancel, and a report once Slurm "
        "confirms that the job is gone and its GPUs are free.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--allow-user",
        action="append",
        metavar="NAME",
        help="user whose jobs may be stopped (default: the receiver's user)",
    )
    add("--allow-any-user", action="store_true", help="stop any job that Slurm permits the receiver's user to stop")
    add(
        "--allow-partition",
        action="append",
        metavar="NAME",
        help="partition in which jobs may be stopped (default: all)",
    )
    add(
        "--checkpoint-signal",
        metavar="NAME[@WHERE]",
        help="USR1, USR2 or HUP, to the batch script (@batch), the steps (@steps) or both (@full); "
        "for runs without a label checkpoint_signal (default: none is sent)",
    )
    add(
        "--park-partition",
        metavar="NAME",
        help="preemptible low-priority partition into which parked jobs are requeued (default: requeued and held)",
    )
    add("--rest", metavar="URL", help="use slurmrestd instead of Slurm's commands: http://host:port or unix:/path")
    add("--cluster", metavar="NAME", help="the cluster's name, required with --rest")
    add("--rest-user", metavar="NAME", help="X-SLURM-USER-NAME (default: from the token)")
    add("--token-file", type=Path, metavar="FILE", help="file with the JWT, read at every request")
    add("--token-command", metavar="COMMAND", help="prints the JWT, run at every request (default: $SLURM_JWT)")
    add_service_options(parser)
    add_receiver_options(parser)
    parser.set_defaults(run=run_slurm_receiver)


def run_slurm_receiver(options: argparse.Namespace) -> int:
    users = None if options.allow_any_user else frozenset(options.allow_user or [_find_user()])
    partitions = frozenset(options.allow_partition) if options.allow_partition else None
    signal = parse_checkpoint_signal(options.checkpoint_signal) if options.checkpoint_signal else None
    if options.rest and options.park_partition:
        raise ConfigurationError("park-partition: slurmrestd can only cancel.")
    if options.rest and signal is not None and signal.where != "full":
        raise ConfigurationError(f"checkpoint signal {signal}: slurmrestd can only signal the whole job; write @full.")
    action = SlurmJobControl(
        _create_cluster(options),
        users=users,
        partitions=partitions,
        default_signal=signal,
        park_partition=options.park_partition,
    )
    return run_receiver(action, options, "slurm")


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        raise ConfigurationError("allow-user: this user has no name; name users with --allow-user.") from None


def _create_cluster(options: argparse.Namespace) -> Cluster:
    environment = copy_environment(options.secret_env, options.key_env)
    if not options.rest:
        programs = Programs(environment)
        if options.cluster:
            raise ConfigurationError("cluster: it requires --rest; Slurm's commands know their cluster.")
        missing = programs.list_missing()
        if missing:
            raise ConfigurationError(
                f"PATH: it has no {', '.join(missing)}; start the receiver where Slurm's commands are installed, "
                "or use slurmrestd with --rest."
            )
        return programs
    if not options.cluster:
        raise ConfigurationError(
            "cluster: set the cluster with --cluster, with the value of SLURM_CLUSTER_NAME in a job."
        )
    token = _choose_token(options, environment)
    return Rest(validate_rest_url(options.rest), options.cluster, options.rest_user, token)


def _choose_token(options: argparse.Namespace, environment: dict[str, str]) -> Callable[[], str]:
    if options.token_command:
        command = shlex.split(options.token_command)

        def by_command() -> str:
            result = run(command, environment, TOKEN_SECONDS)
            if result.exit_code != 0:
                raise SchedulerUnavailable(f"no token: {result.last_line}")
            return parse_token(result.output)

        return by_command
    if options.token_file:
        file: Path = options.token_file

        def by_file() -> str:
            try:
                return parse_token(file.read_text())
            except (OSError, UnicodeDecodeError) as error:
                raise SchedulerUnavailable(f"no token: {error}") from None

        return by_file
    token = parse_token(os.environ.get("SLURM_JWT", ""))
    if not token:
        raise ConfigurationError("token: --rest needs --token-file, --token-command or SLURM_JWT.")
    return lambda: token

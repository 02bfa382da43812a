"""`evalstop-receiver command`: ends jobs of any scheduler with the operator's commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.command.job_control import GONE_EXIT_CODE, CommandJobControl, Commands
from evalstop_client.receivers.command.template import Template, parse_template
from evalstop_client.receivers.stop.options import add_receiver_options, add_seconds, add_service_options, parse_pairs
from evalstop_client.receivers.stop.receiver import run_receiver
from evalstop_client.receivers.stop.subprocesses import copy_environment

IDS = frozenset({"run_id", "decision_id"})
"""Placeholders that the receiver fills itself."""

EXAMPLES = """\
examples:
  # cancel and check with your own commands; {job_id} is a label of the run
  evalstop-receiver command --run 'my-cancel {job_id}' --check 'my-status {job_id}' --pattern 'job_id=[1-9][0-9]*'

  # only runs of one scheduler, only jobs of two users, a signal before the cancel
  evalstop-receiver command --mine scheduler=lsf --allow user=ann --allow user=ben \\
    --pattern 'job_id=[1-9][0-9]*(\\[[1-9][0-9]*\\])?' \\
    --signal 'bkill -s USR1 {job_id}' --run 'bkill {job_id}' --force 'bkill -s KILL {job_id}' \\
    --check 'lsf-gone {job_id}'

The exit code of --check: 0, the job exists; 3 (--gone-exit-code), it is gone; any other, unknown, and the check is
repeated. Its output when the job is gone goes into the report; a JSON object is included as it is.
--pattern is a regular expression for the whole value of a label in a command: some values may mean all jobs of a user,
as 0 does for LSF.
The commands are split as by a shell but not run by one; each label value stays one argument.
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "command",
        help="end jobs of any scheduler with your own commands",
        description="End jobs of any scheduler with commands, into which labels of the run are filled.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", dest="cancel", required=True, metavar="COMMAND", help="cancels the job")
    add("--check", required=True, metavar="COMMAND", help="whether the job exists (0) or is gone (3)")
    add("--signal", metavar="COMMAND", help="makes the job save a checkpoint")
    add("--force", metavar="COMMAND", help="ends a job that survives the cancel (default: --run again)")
    add(
        "--park",
        metavar="COMMAND",
        help="sets the job aside so that --resume can resume it; --check then reports it as gone",
    )
    add("--resume", metavar="COMMAND", help="resumes a parked or stopped job; must be safe to run on a running job")
    add("--mine", action="append", default=[], metavar="LABEL=VALUE", help="handle only runs with this label")
    add("--allow", action="append", default=[], metavar="LABEL=VALUE", help="allowed value of this label")
    add(
        "--pattern",
        action="append",
        default=[],
        metavar="LABEL=REGEX",
        help="pattern for the whole value of a label; required for each label in a command",
    )
    add(
        "--gone-exit-code",
        type=int,
        default=GONE_EXIT_CODE,
        metavar="N",
        help="exit code of --check for a gone job (default: %(default)s)",
    )
    add_seconds(parser, "--command-seconds", 60.0, "timeout of each command")
    add_service_options(parser)
    add_receiver_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the receiver for a scheduler that is controlled by commands."""
    if options.gone_exit_code == 0:
        raise ConfigurationError("gone-exit-code: 0 means that the job exists; choose another.")
    own_labels = {name: values[-1] for name, values in parse_pairs(options.mine, "--mine").items()}
    allow = {name: frozenset(values) for name, values in parse_pairs(options.allow, "--allow").items()}
    commands = Commands(
        cancel=parse_template(options.cancel),
        check=parse_template(options.check),
        signal=_parse_optional(options.signal),
        force=_parse_optional(options.force),
        park=_parse_optional(options.park),
        resume=_parse_optional(options.resume),
    )
    action = CommandJobControl(
        commands,
        copy_environment(options.secret_env, options.key_env),
        own_labels=own_labels,
        allow=allow,
        patterns=_parse_patterns(options.pattern, commands.names - IDS),
        command_seconds=options.command_seconds,
        gone_exit_code=options.gone_exit_code,
    )
    return run_receiver(action, options, "command")


def _parse_patterns(texts: Sequence[str], labels: frozenset[str]) -> dict[str, re.Pattern[str]]:
    """The patterns by label; each label must have one."""
    try:
        patterns = {name: re.compile(values[-1]) for name, values in parse_pairs(texts, "--pattern").items()}
    except re.error as error:
        raise ConfigurationError(f"--pattern: {error}.") from None
    for name in sorted(labels - patterns.keys()):
        raise ConfigurationError(f"--pattern: set a pattern for {{{name}}}, as in --pattern '{name}=[1-9][0-9]*'.")
    return patterns


def _parse_optional(text: str | None) -> Template | None:
    return None if text is None else parse_template(text)

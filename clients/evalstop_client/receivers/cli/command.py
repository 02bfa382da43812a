"""`evalstop-receiver command`: ends jobs of any scheduler by commands that the operator names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.command.job_control import GONE_EXIT_CODE, CommandJobControl, Commands
from evalstop_client.receivers.command.template import Template, template
from evalstop_client.receivers.stop.options import add_receiver_options, add_service_options, pairs, seconds
from evalstop_client.receivers.stop.receiver import stand
from evalstop_client.receivers.stop.subprocesses import environment_without

IDS = frozenset({"run_id", "decision_id"})
"""Places that the service fills itself."""

EXAMPLES = """\
examples:
  # cancel and check by two commands of your own; {job_id} is a label of the run
  evalstop-receiver command --run 'my-cancel {job_id}' --check 'my-status {job_id}' --pattern 'job_id=[1-9][0-9]*'

  # only runs of one scheduler, only jobs of two users, a signal before the cancel
  evalstop-receiver command --mine scheduler=lsf --allow user=ann --allow user=ben \\
    --pattern 'job_id=[1-9][0-9]*(\\[[1-9][0-9]*\\])?' \\
    --signal 'bkill -s USR1 {job_id}' --run 'bkill {job_id}' --force 'bkill -s KILL {job_id}' \\
    --check 'lsf-gone {job_id}'

--check answers by its exit code: 0, the job is there; 3 (--gone-exit-code), it is gone; any other, it cannot be told
now and is asked again. What it prints when the job is gone goes into the report, an object of JSON as it is.
--pattern says what may stand for each label in a command, as a regular expression for the whole value: a scheduler may
take a word or a number for all jobs of its user, as LSF takes 0.
The commands are split as a shell would and never given to one; each value of a label stays one argument.
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `command` to the command line."""
    parser = kinds.add_parser(
        "command",
        help="end jobs of any scheduler by your own commands",
        description="Ends the jobs of any scheduler by commands, with the labels of the run filled in.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", dest="cancel", required=True, metavar="COMMAND", help="cancels the job")
    add("--check", required=True, metavar="COMMAND", help="tells whether the job is there (0) or gone (3)")
    add("--signal", metavar="COMMAND", help="makes the job save a checkpoint")
    add("--force", metavar="COMMAND", help="ends a job that did not end when it was cancelled (default: --run again)")
    add("--park", metavar="COMMAND", help="sets the job aside so that --resume brings it back; --check then says gone")
    add("--resume", metavar="COMMAND", help="lets a job that was parked, or stopped, go on")
    add("--mine", action="append", default=[], metavar="LABEL=VALUE", help="only runs with this label are ours")
    add("--allow", action="append", default=[], metavar="LABEL=VALUE", help="a value that this label may have")
    add(
        "--pattern",
        action="append",
        default=[],
        metavar="LABEL=REGEX",
        help="what a label has to match as a whole; needed for each label in a command",
    )
    add("--gone-exit-code", type=int, default=GONE_EXIT_CODE, metavar="N", help="of --check (default: %(default)s)")
    add("--command-seconds", type=seconds, default=60.0, metavar="S", help="for each command (default: 60)")
    add_service_options(parser)
    add_receiver_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the receiver of a scheduler that is controlled by commands."""
    if options.gone_exit_code == 0:
        raise ConfigurationError("gone-exit-code: 0 means that the job is there; choose another.")
    mine = {name: values[-1] for name, values in pairs(options.mine, "--mine").items()}
    allow = {name: frozenset(values) for name, values in pairs(options.allow, "--allow").items()}
    commands = Commands(
        cancel=template(options.cancel),
        check=template(options.check),
        signal=_optional(options.signal),
        force=_optional(options.force),
        park=_optional(options.park),
        resume=_optional(options.resume),
    )
    action = CommandJobControl(
        commands,
        environment_without(options.secret_env, options.key_env),
        mine=mine,
        allow=allow,
        patterns=_patterns(options.pattern, commands.names - IDS),
        command_seconds=options.command_seconds,
        gone_exit_code=options.gone_exit_code,
    )
    return stand(action, options, "command")


def _patterns(texts: Sequence[str], labels: frozenset[str]) -> dict[str, re.Pattern[str]]:
    """The patterns by label; every one of the labels has to have one."""
    try:
        patterns = {name: re.compile(values[-1]) for name, values in pairs(texts, "--pattern").items()}
    except re.error as error:
        raise ConfigurationError(f"--pattern: {error}.") from None
    for name in sorted(labels - patterns.keys()):
        raise ConfigurationError(f"--pattern: say what {{{name}}} may be, as in --pattern '{name}=[1-9][0-9]*'.")
    return patterns


def _optional(text: str | None) -> Template | None:
    return None if text is None else template(text)

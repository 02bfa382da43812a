"""`evalstop-receiver command`: ends jobs of any other scheduler with commands, into which labels of the run are filled.

A command is split as a shell does, but no shell runs it: each label stays one argument.
"""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.job_control import Gone, Job, JobControl, Parked, Present, StopRequest
from evalstop_client.receivers.stop.processes import Done, copy_environment
from evalstop_client.receivers.stop.processes import run as run_program
from evalstop_client.receivers.stop.receiver import (
    add_receiver_options,
    add_seconds,
    add_service_options,
    run_receiver,
)
from evalstop_client.settings import parse_pairs

PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_.-]*)\}|[{}]")
ALLOWED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%+,=/\[\]-]{0,255}", re.ASCII)


@dataclass(frozen=True)
class Template:
    """A command as arguments that may contain `{label}`; `{{` and `}}` are literal braces."""

    arguments: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(
            match[1] for argument in self.arguments for match in PLACE.finditer(argument) if match[1] is not None
        )

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """The command for these labels; raises RequestRefused if one is missing or not allowed."""
        checked = {name: allowed(name, values.get(name, "")) for name in self.names}

        def fill(match: re.Match[str]) -> str:
            return checked[match[1]] if match[1] is not None else match[0][0]

        return [PLACE.sub(fill, argument) for argument in self.arguments]


def parse_template(text: str) -> Template:
    """Split a command as a shell does; raises ConfigurationError."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"command {text!r}: {error}.") from None
    if not arguments:
        raise ConfigurationError("command: it is empty; write one such as 'my-cancel {job_id}'.")
    for argument in arguments:
        stray = [match[0] for match in PLACE.finditer(argument) if match[0] in ("{", "}")]
        if stray:
            raise ConfigurationError(
                f"command {text!r}: {argument!r} has a brace that is not a {{label}}; write a literal one twice."
            )
    if "{" in arguments[0]:
        raise ConfigurationError(f"command {text!r}: the program itself cannot come from a label.")
    return Template(arguments)


def allowed(name: str, value: str) -> str:
    """Return the value if it is safe: not an option, not a path upwards, no character that is expanded."""
    if not value:
        raise RequestRefused(f"the run has no label {name}, which the command needs")
    if not ALLOWED.fullmatch(value) or ".." in value:
        raise RequestRefused(
            f"label {name} is {value[:80]!r}: letters, digits and _.:@%+,=/[]- are allowed, "
            "the first one a letter, a digit or _, no two dots in a row, 256 at most"
        )
    return value


logger = logging.getLogger("evalstop_client.receivers")

GONE_EXIT_CODE = 3  # as init scripts and `systemctl` report a service that does not run


OPERATIONS = ("cancel", "check", "signal", "force", "park", "resume")
"""What commands do. Without `signal`, `park` or `resume` that is not possible; without `force` a job is cancelled
again."""


def list_names(commands: Mapping[str, Template]) -> frozenset[str]:
    """The labels that these commands need."""
    return frozenset[str]().union(*(command.names for command in commands.values()))


class CommandJobControl(JobControl):
    """Ends jobs with commands, one for each of `OPERATIONS` that is possible.

    `own_labels`: the labels of runs that this receiver handles. `patterns`: for the whole value of labels; other values
    are refused. A harmless text may still mean all jobs to a command, as 0 does to LSF's bkill.
    """

    def __init__(
        self,
        commands: Mapping[str, Template],
        environment: Mapping[str, str],
        *,
        own_labels: Mapping[str, str] | None = None,
        patterns: Mapping[str, re.Pattern[str]] | None = None,
        command_seconds: float = 60.0,
    ) -> None:
        self._commands = commands
        self._environment = environment
        self._own_labels = own_labels or {}
        self._patterns = patterns or {}
        self._command_seconds = command_seconds

    def find_job(self, request: StopRequest) -> Job | None:
        """Check the labels that the commands need; runs nothing."""
        if any(request.labels.get(name) != value for name, value in self._own_labels.items()):
            return None
        for name, pattern in self._patterns.items():
            if not pattern.fullmatch(request.labels.get(name, "")):
                raise RequestRefused(f"label {name} is {request.labels.get(name)!r}, which does not match its pattern")
        facts = {name: allowed(name, request.labels.get(name, "")) for name in sorted(list_names(self._commands))}
        return Job(facts.get("job_id") or " ".join(facts.values()), facts)

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Run the signal command, if any."""
        signal = self._commands.get("signal")
        return signal is not None and self._run_on_present(signal, job)

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Run the cancel command; it may fail if the job is gone."""
        self._run_on_present(self._commands["cancel"], job)

    def kill_job(self, job: Job) -> None:
        """Run the force command, or cancel again; it may fail if the job is gone."""
        self._run_on_present(self._commands.get("force") or self._commands["cancel"], job)

    def check_job(self, job: Job) -> Present | Gone:
        """Run the check command: exit 0, the job exists; 3, it is gone; any other, unknown."""
        check = self._commands["check"]
        result = self._run_template(check, job)
        if result.exit_code == 0:
            return Present(_first_line(result) or "there")
        if result.exit_code == GONE_EXIT_CODE:
            line = _first_line(result)
            return Gone("gone", {"said": line} if line else {})
        raise SchedulerUnavailable(f"{check.arguments[0]}: exit code {result.exit_code}: {result.last_line}")

    def park_job(self, job: Job, request: StopRequest) -> None:
        """Run the park command; RequestRefused without commands that park and resume."""
        if not {"park", "resume"} <= self._commands.keys():
            raise RequestRefused("this receiver was given no commands that park and resume a job (--park, --resume)")
        self._run_or_raise(self._commands["park"], job)

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        """The same check: after a park command, a job that is gone is parked."""
        state = self.check_job(job)
        return Parked(state.state, state.details) if isinstance(state, Gone) else state

    def resume_job(self, job: Job) -> None:
        """Run the resume command; RequestRefused without one."""
        if "resume" not in self._commands:
            raise RequestRefused("this receiver was given no command that resumes a job (--resume)")
        self._run_or_raise(self._commands["resume"], job)

    def _run_template(self, command: Template, job: Job) -> Done:
        return run_program(command.filled(job.facts), self._environment, self._command_seconds)

    def _run_on_present(self, command: Template, job: Job) -> bool:
        """Run a command; False if it failed because the job is gone: schedulers refuse to cancel such a job."""
        try:
            self._run_or_raise(command, job)
        except SchedulerUnavailable:
            if isinstance(self.check_job(job), Gone):
                return False
            raise
        return True

    def _run_or_raise(self, command: Template, job: Job) -> None:
        result = self._run_template(command, job)
        if result.exit_code != 0:
            raise SchedulerUnavailable(f"{command.arguments[0]}: exit code {result.exit_code}: {result.last_line}")


def _first_line(result: Done) -> str:
    return next((line.strip()[:100] for line in result.output.splitlines() if line.strip()), "")


def add_options(parser: argparse.ArgumentParser) -> None:
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
    add(
        "--pattern",
        action="append",
        default=[],
        metavar="LABEL=REGEX",
        help="pattern for the whole value of a label, such as user=ann|bob; required for each label in a command",
    )
    add_seconds(parser, "--command-seconds", 60.0, "timeout of each command")
    add_service_options(parser)
    add_receiver_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the receiver for a scheduler that is controlled by commands."""
    own_labels = dict(parse_pairs(options.mine, "--mine"))
    texts = {name: getattr(options, name) for name in OPERATIONS}
    commands = {name: parse_template(text) for name, text in texts.items() if text is not None}
    action = CommandJobControl(
        commands,
        copy_environment(options.secret_env, options.key_env),
        own_labels=own_labels,
        patterns=_parse_patterns(options.pattern, list_names(commands)),
        command_seconds=options.command_seconds,
    )
    return run_receiver(action, options, "command")


def _parse_patterns(texts: Sequence[str], labels: frozenset[str]) -> dict[str, re.Pattern[str]]:
    """The patterns by label; each label must have one."""
    try:
        patterns = {name: re.compile(pattern) for name, pattern in parse_pairs(texts, "--pattern")}
    except re.error as error:
        raise ConfigurationError(f"--pattern: {error}.") from None
    for name in sorted(labels - patterns.keys()):
        raise ConfigurationError(f"--pattern: set a pattern for {{{name}}}, as in --pattern '{name}=[1-9][0-9]*'.")
    return patterns

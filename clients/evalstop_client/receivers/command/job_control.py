"""Cancels and checks jobs of any other scheduler with the operator's commands, filled in with labels of the run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.command.template import Template, allowed
from evalstop_client.receivers.stop.job_control import ForeignJob, Gone, Job, Parked, Present, StopRequest
from evalstop_client.receivers.stop.subprocesses import Done, run

logger = logging.getLogger("evalstop_client.receivers")

GONE_EXIT_CODE = 3  # as init scripts and `systemctl` report a service that does not run


@dataclass(frozen=True)
class Commands:
    """The command for each operation. `signal`, `park` and `resume` may be None: not possible; `force` None: cancel
    again."""

    cancel: Template
    check: Template
    signal: Template | None = None
    force: Template | None = None
    park: Template | None = None
    resume: Template | None = None

    @property
    def names(self) -> frozenset[str]:
        commands = (self.cancel, self.check, self.signal, self.force, self.park, self.resume)
        return frozenset().union(*(command.names for command in commands if command is not None))


class CommandJobControl:
    """Ends jobs with commands.

    `own_labels`: the labels of runs that this receiver handles. `allow`: the allowed values of labels; other values are
    refused. `patterns`: patterns for the whole value of a label. A harmless text may still mean all jobs to a command,
    as 0 does to LSF's bkill.
    """

    name = "evalstop-receiver command"
    part = None

    def __init__(
        self,
        commands: Commands,
        environment: Mapping[str, str],
        *,
        own_labels: Mapping[str, str] | None = None,
        allow: Mapping[str, frozenset[str]] | None = None,
        patterns: Mapping[str, re.Pattern[str]] | None = None,
        command_seconds: float = 60.0,
        gone_exit_code: int = GONE_EXIT_CODE,
    ) -> None:
        self._commands = commands
        self._environment = environment
        self._own_labels = own_labels or {}
        self._allow = allow or {}
        self._patterns = patterns or {}
        self._command_seconds = command_seconds
        self._gone_exit_code = gone_exit_code

    def find_job(self, request: StopRequest) -> Job | ForeignJob:
        """Check the labels that the commands need; runs nothing."""
        if any(request.labels.get(name) != value for name, value in self._own_labels.items()):
            return ForeignJob()
        for name, values in self._allow.items():
            if request.labels.get(name) not in values:
                raise RequestRefused(f"label {name} is {request.labels.get(name)!r}, which is not on the allow-list")
        for name, pattern in self._patterns.items():
            if not pattern.fullmatch(request.labels.get(name, "")):
                raise RequestRefused(f"label {name} is {request.labels.get(name)!r}, which does not match its pattern")
        known_values = {**request.labels, "run_id": request.run_id, "decision_id": request.decision_id}
        facts = {name: allowed(name, known_values.get(name, "")) for name in sorted(self._commands.names)}
        return Job(facts.get("job_id") or " ".join(facts.values()), facts)

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Run the signal command, if any."""
        return self._commands.signal is not None and self._run_on_present(self._commands.signal, job)

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Run the cancel command; it may fail if the job is gone."""
        self._run_on_present(self._commands.cancel, job)

    def kill_job(self, job: Job) -> None:
        """Run the force command, or cancel again; it may fail if the job is gone."""
        self._run_on_present(self._commands.force or self._commands.cancel, job)

    def check_job(self, job: Job) -> Present | Gone:
        """Run the check command: exit 0, the job exists; `gone_exit_code`, it is gone; any other, unknown."""
        result = self._run_template(self._commands.check, job)
        if result.exit_code == 0:
            return Present(_first_line(result) or "there")
        if result.exit_code == self._gone_exit_code:
            return Gone("gone", _read_details(result))
        raise SchedulerUnavailable(
            f"{self._commands.check.arguments[0]}: exit code {result.exit_code}: {result.last_line}"
        )

    def park_job(self, job: Job, request: StopRequest) -> None:
        """Run the park command; RequestRefused without commands that park and resume."""
        if self._commands.park is None or self._commands.resume is None:
            raise RequestRefused("this receiver was given no commands that park and resume a job (--park, --resume)")
        self._run_or_raise(self._commands.park, job)

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        """The same check: after a park command, a job that is gone is parked."""
        state = self.check_job(job)
        return Parked(state.state, state.details) if isinstance(state, Gone) else state

    def resume_job(self, job: Job) -> None:
        """Run the resume command; RequestRefused without one."""
        if self._commands.resume is None:
            raise RequestRefused("this receiver was given no command that resumes a job (--resume)")
        self._run_or_raise(self._commands.resume, job)

    def _run_template(self, command: Template, job: Job) -> Done:
        return run(command.filled(job.facts), self._environment, self._command_seconds)

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


def _read_details(result: Done) -> dict[str, Any]:
    """The check's output for the report: a JSON object as it is, text as one line."""
    try:
        document = json.loads(result.output)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and len(document) <= 50 and len(result.output) <= 10_000:
        return {str(name): value for name, value in document.items()}
    line = _first_line(result)
    return {"said": line} if line else {}

"""The conformance suite for receivers without a scheduler of their own: processes and commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from evalstop_client.receivers.child_job import LABEL, ChildJob, ProcessJobControl
from evalstop_client.receivers.command import CommandJobControl, parse_template
from evalstop_client.receivers.stop.processes import copy_environment

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import SavingConformance, StartedJob

JOB = """
import pathlib, signal, sys, time
saves, ignores_sigterm = pathlib.Path(sys.argv[1]), sys.argv[2] == "True"
def save(*_):
    with saves.open("a") as file:
        file.write("saved ")
signal.signal(signal.SIGUSR1, save)
if ignores_sigterm:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
saves.touch()
while True:
    time.sleep(0.1)
"""


@dataclass
class ProcessLauncher:
    """Starts jobs that are child processes."""

    folder: Path
    jobs: list[ChildJob] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / f"saves-{len(self.jobs)}"

    def start_child(self, ignores_sigterm: bool) -> ChildJob:
        file = self.folder / f"saves-{len(self.jobs) + 1}"
        job = ChildJob([sys.executable, "-c", JOB, str(file), str(ignores_sigterm)], copy_environment())
        self.jobs.append(job)
        wait_until(file.exists)
        return job

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        job_control = ProcessJobControl(self.start_child(ignores_sigterm), "mine", None, signal.SIGUSR1)
        return StartedJob(job_control, {LABEL: "mine"})

    def count_saves(self) -> int:
        return len(self.file.read_text().split())


class CommandLauncher(ProcessLauncher):
    """Starts jobs that are checked and ended by commands, as a scheduler does."""

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        job = self.start_child(ignores_sigterm)
        script = self.folder / "scheduler.sh"
        script.write_text(SCRIPT)

        def make_command(verb: str) -> str:
            return f"bash '{script}' {verb} {{job_id}}"

        verbs = {"cancel": "TERM", "check": "check", "signal": "USR1", "force": "KILL"}
        commands = {operation: parse_template(make_command(verb)) for operation, verb in verbs.items()}
        return StartedJob(CommandJobControl(commands, copy_environment()), {"job_id": str(job.pid)})


SCRIPT = """
state=$(cut -d' ' -f3 /proc/$2/stat 2>/dev/null) || state=Z
case "$1:$state" in
check:Z) echo ended; exit 3;;
check:*) echo "state $state";;
*:Z) echo "no such job" >&2; exit 255;;
*) kill -$1 $2;;
esac
"""


@pytest.fixture
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessLauncher]:
    launcher: ProcessLauncher = request.cls.kind(tmp_path)
    yield launcher
    for job in launcher.jobs:
        job.signal(signal.SIGKILL)
        job.wait(60)


class TestProcess(SavingConformance):
    """`evalstop-receiver process`."""

    kind = ProcessLauncher


class TestCommand(SavingConformance):
    """`evalstop-receiver command`."""

    kind = CommandLauncher

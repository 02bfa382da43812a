"""A job that runs as a child process of the receiver, and how it is ended.

SIGTERM, grace period, SIGKILL, then a check that no process is left. A launcher may put its workers into separate
sessions (torchrun does), where a signal to the job's group does not reach them. The receiver becomes the subreaper
(Linux), so that orphans stay its descendants. A restartable job is parked by ending it, and resumed by starting it
again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalstop_client.errors import EventMalformed, RequestRefused, SchedulerUnavailable
from evalstop_client.latest_answer import EXPLOIT_DECISION, Exploit
from evalstop_client.receivers.stop.job_control import Gone, Job, JobControl, Parked, Present, StopRequest

DEAD_STATES = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    group: int
    state: str
    started: str = ""  # in clock ticks since the machine's start; "" from `ps`


def find_living_processes(group: int, ancestor: int) -> list[Process]:
    """The living processes of `group` and the living descendants of `ancestor`."""
    table = list(list_processes())
    family = find_family(table, {ancestor})
    return [
        process
        for process in table
        if process.pid != os.getpid()
        and process.state[:1] not in DEAD_STATES
        and (process.group == group or process.pid in family)
    ]


def find_family(processes: list[Process], family: set[int]) -> set[int]:
    """The ids of a family with those of all descendants, of these processes."""
    while born := {process.pid for process in processes if process.parent in family} - family:
        family = family | born
    return family


def list_processes() -> Iterator[Process]:
    """All processes, from /proc, or from `ps` where there is no /proc."""
    return _from_proc() if Path("/proc/self/stat").exists() else list_processes_by_ps()


def list_processes_by_ps() -> Iterator[Process]:
    """All processes but the `ps` that lists them."""
    command = ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # a constant
    for line in listing.communicate()[0].splitlines():
        pid, parent, group, state = line.split()[:4]
        if int(pid) != listing.pid:
            yield Process(int(pid), int(parent), int(group), state)


def reap_orphans(child: int) -> None:
    """Reap adopted processes that have exited; `child` is left to its own waiter."""
    for process in list_processes():
        if process.parent == os.getpid() and process.pid != child and process.state[:1] in DEAD_STATES:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _from_proc() -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # "pid (command) state ppid pgrp ...": the command may hold spaces and parentheses itself
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield Process(int(folder.name), int(fields[1]), int(fields[2]), fields[0], fields[19])


logger = logging.getLogger("evalstop_client.receivers")

LABEL = "receiver"
FORCE_SECONDS = 1.0
POLL_SECONDS = 0.05


class ChildJob:
    """A command running in a new session and process group, with the receiver's standard streams."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(command, env=dict(environment), start_new_session=True)

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its group."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """The child's exit status, -N if signal N killed it; None while it runs."""
        return self._child.poll()

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Wait for the child to end and return its exit status; None on timeout."""
        try:
            return self._child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class ProcessJobControl(JobControl):
    """Controls one job, for the runs started in it.

    `ancestor` is the process whose descendants are all part of the job: the receiver once it adopts orphans and has no
    other children; None: the job's child itself. `checkpoint_signal`: makes the job save a checkpoint; None if it has
    none. `restart` starts the job again, with additional variables; None: not restartable, and never parked.
    `grace_seconds`: from SIGTERM to SIGKILL when the job is restarted to copy another run.
    """

    part = "process"

    def __init__(
        self,
        job: ChildJob,
        receiver_id: str,
        ancestor: int | None = None,
        checkpoint_signal: int | None = None,
        restart: Callable[[dict[str, str]], ChildJob] | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        self._job = job
        self._receiver_id = receiver_id
        self._ancestor = ancestor
        self._checkpoint_signal = checkpoint_signal
        self._restart = restart
        self._parked = False
        self._resume_requested = False  # a parked job that is still ending is started again once it has ended
        self._grace_seconds = grace_seconds
        self._copies: set[str] = set()  # decisions for which the job was, or is being, restarted
        self._added: dict[str, str] = {}  # variables of the next start
        self._kill_at: float | None = None
        self._gone: ChildJob | None = None  # the job of which no process was left: its ids may belong to others now
        self._changing = threading.Lock()
        self._members: dict[str, set[tuple[int, str]]] = {}  # by part of the job: id and start time of its processes

    @property
    def job(self) -> ChildJob:
        return self._job

    @property
    def is_parked(self) -> bool:
        """Whether the job is parked or being parked."""
        return self._parked

    def find_job(self, request: StopRequest) -> Job | None:
        """This receiver's job, if the run has its label; to be stopped, a parked job is one that has ended."""
        if request.labels.get(LABEL) != self._receiver_id:
            return None
        if request.ends == "process":
            return self._find_part(request.labels.get("process_id", ""))
        if not request.parks:
            self._parked = self._resume_requested = False
        return Job(str(self._job.pid))

    def _find_part(self, process_id: str) -> Job:
        """The process of one of several runs. It is this receiver's to end if it descends from the job."""
        pid, _, started = process_id.partition(":")
        if not pid.isdecimal() or not started.isdecimal() or int(pid) == self._job.pid:
            raise RequestRefused(f"label process_id is {process_id[:40]!r}, which is no process of its own in this job")
        part = Job(process_id, {"pid": pid, "started": started})
        if not self._list_part(part):  # it may have ended, or count its processes in a container of its own
            raise RequestRefused(f"the job has no living process {pid} that started at {started}; its other runs go on")
        return part

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Send the checkpoint signal only to the job's main process: its child processes may not handle it, and would
        die."""
        if self._checkpoint_signal is None:
            return False
        if "pid" in job.facts:
            first = [process for process in self._list_part(job) if str(process.pid) == job.facts["pid"]]
            _signal_each(first, self._checkpoint_signal)
            return True
        with contextlib.suppress(ProcessLookupError):
            if self._job.exit_status is None:
                os.kill(self._job.pid, self._checkpoint_signal)
        return True

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Send SIGTERM to the whole group; if only a part may end, to its process and that one's descendants."""
        if "pid" in job.facts:
            logger.info("SIGTERM to process %s and its descendants", job.facts["pid"])
            _signal_each(self._list_part(job), signal.SIGTERM)
            return
        logger.info("SIGTERM to process group %d", self._job.pid)
        if any(process.group == self._job.pid for process in self._list_living()):
            self._job.signal(signal.SIGTERM)
        else:  # the group is gone, and its id may be reused: only descendants are left
            _signal_each(self._list_living(), signal.SIGTERM)

    def kill_job(self, job: Job) -> None:
        """Send SIGKILL to every remaining process, repeatedly: they may be forking."""
        if "pid" in job.facts:
            _signal_each(self._list_part(job), signal.SIGKILL)
            return
        until = time.monotonic() + FORCE_SECONDS
        while not self._is_gone() and time.monotonic() < until:
            living = self._list_living()
            logger.info("SIGKILL to %s", [process.pid for process in living])
            _signal_each(living, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def check_job(self, job: Job) -> Present | Gone:
        """Whether the job, or any process that it left, is alive."""
        if "pid" in job.facts and not self._is_gone():
            if self._list_part(job):
                return Present("running")
            return Gone("ended", {"pid": int(job.facts["pid"]), "note": "the process has ended; the job goes on"})
        if not self._is_gone():
            return Present("running" if self._job.exit_status is None else f"survived by {len(self._list_living())}")
        status = self._job.exit_status
        assert status is not None
        return Gone("ended", {"pid": self._job.pid, "exit_status": status})

    def park_job(self, job: Job, request: StopRequest) -> None:
        """End it as a stop does; RequestRefused if it is not restartable."""
        if self._restart is None:
            raise RequestRefused("the job cannot be parked: this receiver runs without --restartable")
        self._parked, self._resume_requested, self._added = True, False, {}
        self.cancel_job(job, request)

    def check_parked(self, job: Job) -> Present | Parked | Gone:
        """Parked once no process is left."""
        state = self.check_job(job)
        if isinstance(state, Gone) and self._parked:
            return Parked("ended, to be started again", {**state.details, "parked_as": "terminated"})
        return state

    def resume_job(self, job: Job) -> None:
        """Restart a parked job, once it has ended; any other process that has ended cannot be resumed.

        One that has survived runs on.
        """
        if "pid" in job.facts:
            if isinstance(self.check_job(job), Gone):
                raise RequestRefused("a process that has ended cannot be resumed")
            return
        with self._changing:
            is_gone = self._is_gone()
            if self._parked:
                self._resume_requested = True
                if is_gone:
                    self._start_again()
            elif is_gone:
                raise RequestRefused("a process that has ended cannot be resumed; start it again from its checkpoint")

    def start_copy(self, request: StopRequest) -> bool:
        """End the job, and start it again with what it is to copy in its environment; the same decision again changes
        nothing, since the job may take long to load the checkpoint.

        False if it is not this receiver's, cannot be restarted, has other runs, is parked, or has ended.
        """
        with self._changing:
            is_own = request.labels.get(LABEL) == self._receiver_id and request.ends == "job"
            if is_own and request.decision_id in self._copies:
                return True
            if not is_own or self._restart is None or self._parked or self._is_gone():
                return False
            self._added = _describe_copy(request)
            self._copies.add(request.decision_id)
            self._parked = self._resume_requested = True
            self._kill_at = time.monotonic() + self._grace_seconds
        self.cancel_job(Job(str(self._job.pid)), request)
        return True

    def restart_resumed_job(self) -> None:
        """Restart a parked job that was still ending when it was resumed, if it has ended by now."""
        with self._changing:
            if self._resume_requested and self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill_job(Job(str(self._job.pid)))
            if self._resume_requested and self._is_gone():
                try:
                    self._start_again()
                except SchedulerUnavailable as error:
                    logger.warning("%s; retrying", error)

    def _start_again(self) -> None:
        assert self._restart is not None
        try:
            self._job = self._restart(self._added)
        except OSError as error:
            raise SchedulerUnavailable(f"the job cannot be started again: {error}") from None
        self._parked = self._resume_requested = False
        self._added, self._kill_at = {}, None

    def _list_part(self, job: Job) -> list[Process]:
        """The living processes of a part: its own one, its descendants, and those of them that lost their parent."""
        living = self._list_living()
        members = self._members.setdefault(job.id, {(int(job.facts["pid"]), job.facts["started"])})
        known = {process.pid for process in living if (process.pid, process.started) in members}
        family = find_family(living, known)
        part = [process for process in living if process.pid in family]
        members |= {(process.pid, process.started) for process in part}
        return part

    def _is_gone(self) -> bool:
        if self._ancestor == os.getpid():
            reap_orphans(self._job.pid)
        job = self._job
        if job.exit_status is None or self._list_living():
            return False
        self._gone = job
        return True

    def _list_living(self) -> list[Process]:
        if self._gone is self._job:
            return []
        return find_living_processes(self._job.pid, self._job.pid if self._ancestor is None else self._ancestor)


def _signal_each(processes: Sequence[Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _describe_copy(request: StopRequest) -> dict[str, str]:
    """The variables that tell a job what to copy; raises EventMalformed."""
    exploit = Exploit.from_json(request.event["data"].get("exploit") or {}, str)
    if exploit is None:
        raise EventMalformed("data.exploit names nothing to copy.")
    return {
        EXPLOIT_DECISION: exploit.decision_id,
        "EVALSTOP_EXPLOIT_CHECKPOINT": exploit.source_checkpoint,
        "EVALSTOP_EXPLOIT_STEP": str(exploit.source_step),
        "EVALSTOP_EXPLOIT_HYPERPARAMETERS": json.dumps(exploit.hyperparameters),
    }

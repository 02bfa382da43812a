"""Ends a job that is a child of the receiver: SIGTERM, a period of grace, SIGKILL, and a look whether all are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from evalstop_client.receivers.action import Ended, Failed, NotMine, StopRequest
from evalstop_client.receivers.descendants import living_members, reap_orphans
from evalstop_client.settings import labels_in, labels_text

logger = logging.getLogger("evalstop_client.receivers")

LABEL = "receiver"
KILL_SECONDS = 10.0  # what is still there so long after SIGKILL hangs in the kernel
LOOK_SECONDS = 0.05


def marked_environment(environment: Mapping[str, str], receiver_id: str) -> dict[str, str]:
    """`environment` with the label added by which a run started in it is found again."""
    labels = {**labels_in(environment.get("EVALSTOP_LABELS", "")), LABEL: receiver_id}
    return {**environment, "EVALSTOP_LABELS": labels_text(labels)}


class Job:
    """A command running in a session and process group of its own, with our standard streams."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        self._exited = threading.Event()
        self.ended_at: datetime | None = None
        threading.Thread(target=self._await_exit, name="job", daemon=True).start()

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its group."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """The child's exit status, -N when signal N killed it; None while it runs."""
        return self._child.returncode if self._exited.is_set() else None

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Wait for the child to end and return its exit status; None when it has not ended by then."""
        self._exited.wait(timeout_seconds)
        return self.exit_status

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _await_exit(self) -> None:
        self._child.wait()
        self.ended_at = datetime.now(UTC)
        self._exited.set()


class ProcessAction:
    """Ends one job, and answers for the runs that were started in it.

    `ancestor` is the process whose descendants are all part of the job: the job's child itself, or the receiver once
    it adopts orphans and has no other children.
    """

    name = "evalstop-receiver process"

    def __init__(self, job: Job, receiver_id: str, grace_seconds: float, ancestor: int | None = None) -> None:
        self._job = job
        self._receiver_id = receiver_id
        self._grace_seconds = grace_seconds
        self._ancestor = job.pid if ancestor is None else ancestor
        self._one_at_a_time = threading.Lock()
        self._result: Ended | Failed | None = None

    def stop(self, request: StopRequest) -> Ended | NotMine | Failed:
        """End the job if the run carries this receiver's label; asked again, the answer is the same."""
        if request.labels.get(LABEL) != self._receiver_id:
            return NotMine()
        with self._one_at_a_time:
            if not isinstance(self._result, Ended):
                self._result = self._end()
            return self._result

    def _end(self) -> Ended | Failed:
        began = time.monotonic()
        if self._is_gone():
            return Ended("the job had already ended by itself", self._details(already_ended=True))
        self._terminate()
        gone = self._wait_gone(self._grace_seconds)
        grace_used_seconds = round(time.monotonic() - began, 3)
        if not gone:
            gone = self._kill()
        details = self._details(
            already_ended=False,
            grace_seconds=self._grace_seconds,
            grace_used_seconds=grace_used_seconds,
        )
        if not gone:
            left = [process.pid for process in self._living()]
            return Failed(f"processes are left even after SIGKILL: {left}", {**details, "left": left})
        how = "SIGTERM" if grace_used_seconds < self._grace_seconds else "SIGKILL after the period of grace"
        return Ended(f"the job ended after {how}", {**details, "ended_at": _text(datetime.now(UTC))})

    def _terminate(self) -> None:
        logger.info("SIGTERM to process group %d, grace %g s", self._job.pid, self._grace_seconds)
        if any(process.group == self._job.pid for process in self._living()):
            self._job.signal(signal.SIGTERM)
        else:  # the group is gone, and its number may be another's soon: only its descendants are left
            self._signal_each(signal.SIGTERM)

    def _kill(self) -> bool:
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            logger.info("SIGKILL to %s", [process.pid for process in self._living()])
            self._signal_each(signal.SIGKILL)  # again and again: they may be forking
            if self._wait_gone(min(1.0, KILL_SECONDS)):
                return True
            if time.monotonic() > deadline:
                return False

    def _signal_each(self, number: int) -> None:
        for process in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _wait_gone(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not self._is_gone():
            if time.monotonic() > deadline:
                return False
            self._job.wait(LOOK_SECONDS) if self._job.exit_status is None else time.sleep(LOOK_SECONDS)
        return True

    def _is_gone(self) -> bool:
        if self._ancestor == os.getpid():
            reap_orphans(self._job.pid)
        return self._job.exit_status is not None and not self._living()

    def _living(self) -> list[Any]:
        return living_members(self._job.pid, self._ancestor)

    def _details(self, **more: Any) -> dict[str, Any]:
        status = self._job.exit_status
        return {
            "pid": self._job.pid,
            "exit_status": status,
            "signal": _signal_name(-status) if status is not None and status < 0 else None,
            "ended_at": _text(self._job.ended_at) if self._job.ended_at else None,
            **more,
        }


def new_receiver_id() -> str:
    """A label value that no other receiver has."""
    return str(uuid.uuid4())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

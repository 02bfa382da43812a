"""The interface to a scheduler's jobs: find, request a checkpoint, cancel, kill, park, check, resume."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from evalstop_client.errors import ConfigurationError, EventMalformed, RequestRefused

STOP_REQUESTED = "run.stop_requested"
STOP_ESCALATED = "run.stop_escalated"
PARK_REQUESTED = "run.park_requested"
RESUME_REQUESTED = "run.resume_requested"
EXPLOIT_REQUESTED = "run.exploit_requested"

DECISION_ID = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
"""It names a file of the journal."""

MOST_REASON = 400
"""Maximum number of characters of a reason passed to a scheduler."""


@dataclass(frozen=True)
class StopRequest:
    """The fields of a stop event that job control needs; `event` is the whole event."""

    webhook_id: str
    decision_id: str
    run_id: str
    run_name: str
    labels: Mapping[str, str]
    reason: str
    event: Mapping[str, Any] = field(repr=False)
    was_parked: bool = False  # the job to be stopped; it may have been started again since its run was judged

    @property
    def parks(self) -> bool:
        """Whether to park the job instead of ending it."""
        return self.event.get("type") == PARK_REQUESTED

    @property
    def ends(self) -> str:
        """`job`, or what alone may end because other runs of the job go on: `step` or `process`."""
        return str((self.event["data"].get("job") or {}).get("ends", "job"))

    @property
    def explanation(self) -> str:
        """The reason, as one sanitized line for the scheduler's records."""
        url, outcome = self.event.get("url"), "parked" if self.parks else "stopped"
        parts = [f"{outcome} by EvalStop: {self.reason}"[:MOST_REASON], f"decision {self.decision_id}"]
        parts += [url] if isinstance(url, str) else []
        return "".join(character if character.isprintable() else " " for character in "; ".join(parts))


@dataclass(frozen=True)
class Job:
    """A job: its scheduler's id, and what else identifies it. Stored in the journal, so it survives a restart."""

    id: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Present:
    """The job holds resources or may get some; `state` is the scheduler's term.

    `again`: it was started again, or waits to be, since the stop found it: whatever was asked of it must be repeated.
    `runs`: not known to be waiting, or ending.
    """

    state: str
    again: bool = False
    runs: bool = True


@dataclass(frozen=True)
class Gone:
    """The scheduler reports that the job is gone and holds no resources; `details` describe the end."""

    state: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unproven:
    """The scheduler shows no job any more, and nothing proves that its processes have ended; `reason` says why."""

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parked:
    """The scheduler reports that the job is parked: it holds no resources that others wait for, and can be resumed."""

    state: str
    details: Mapping[str, Any] = field(default_factory=dict)


class JobControl(Protocol):
    """Controls jobs of one scheduler. What only some schedulers can do has a default.

    Every method may raise SchedulerUnavailable, after which it is called again, and RequestRefused, which fails the
    stop. After a restart each may be called again: cancelling or killing a job that is ending or gone must be
    harmless, and so must parking a parked one.
    """

    part: str | None = None
    """What it can end of a job that goes on, as in `StopRequest.ends`; None: only whole jobs."""

    def find_job(self, request: StopRequest) -> Job | None:
        """Find the job by the run's labels; None if it is another receiver's. RequestRefused if it may not be
        stopped."""

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Make the job save a checkpoint and continue; False if this job has no way to request one."""
        return False

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Have the scheduler end the job, with the scheduler's grace period."""

    def kill_job(self, job: Job) -> None:
        """Kill a job that survived the cancel."""

    def check_job(self, job: Job) -> Present | Gone | Unproven:
        """What the scheduler reports of the job now."""

    def park_job(self, job: Job, request: StopRequest) -> None:
        """Have the scheduler park the job so that `resume_job` can resume it; raises RequestRefused, before any change,
        if that is not possible."""

    def check_parked(self, job: Job) -> Present | Parked | Gone | Unproven:
        """What the scheduler reports of a job that is being parked."""

    def resume_job(self, job: Job) -> None:
        """Resume a job that was parked, or suspended by a stop; raises RequestRefused if that is not possible.

        A job that has survived the stop runs on.
        """

    def others_wait(self, job: Job, parked: Collection[Job]) -> bool:
        """Whether any job waits for the resources that a job has or would get, other than all these parked ones."""
        return True

    def start_copy(self, request: StopRequest) -> bool:
        """Begin to restart a job from the checkpoint of another run; False if its trainer does so itself.

        Raises EventMalformed.
        """
        return False


def parse_event(body: bytes) -> dict[str, Any]:
    """Parse the event of a verified webhook; raises EventMalformed."""
    try:
        event = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EventMalformed(f"The body is not JSON: {error}.") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise EventMalformed("The body must be an object with a type.")
    return event


def parse_stop_request(webhook_id: str, event: Mapping[str, Any]) -> StopRequest:
    """Parse a request from an event about a decision; raises EventMalformed."""
    run, decision, verdict = (_object(event, "data", name) for name in ("run", "decision", "verdict"))
    labels = run.get("labels")
    if not isinstance(run.get("id"), str) or not DECISION_ID.fullmatch(str(decision.get("id"))):
        raise EventMalformed("data.run.id and data.decision.id must be the ids of a run and a decision.")
    return StopRequest(
        webhook_id=webhook_id,
        decision_id=str(decision["id"]),
        run_id=run["id"],
        run_name=str(run.get("name", "")),
        labels={str(name): str(value) for name, value in labels.items()} if isinstance(labels, dict) else {},
        reason=str(verdict.get("reason", "")),
        event=event,
    )


def _object(event: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    value: Any = event
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping):
        raise EventMalformed(f"{'.'.join(path)} must be an object.")
    return value


LABEL = "checkpoint_signal"
NAMES = ("USR1", "USR2", "HUP")
WHERE = ("batch", "steps", "full")


@dataclass(frozen=True)
class CheckpointSignal:
    """`where`, for Slurm: only the batch script, only the steps that srun started, or both."""

    name: str
    where: str = "batch"

    def __str__(self) -> str:
        return f"{self.name}@{self.where}"


def parse_checkpoint_signal(text: str) -> CheckpointSignal:
    """Parse `USR1` or `USR1@steps`; raises ConfigurationError."""
    name, _, where = text.removeprefix("SIG").partition("@")
    if name not in NAMES or (where or "batch") not in WHERE:
        raise ConfigurationError(
            f"checkpoint signal {text!r}: one of {', '.join(NAMES)}, optionally with @ and one of {', '.join(WHERE)}."
        )
    return CheckpointSignal(name, where or "batch")


def choose_signal(labels: Mapping[str, str], default: CheckpointSignal | None) -> CheckpointSignal | None:
    """The signal of the run's label, else the receiver's default; the label `none` means no signal."""
    text = labels.get(LABEL, "")
    if not text:
        return default
    if text == "none":
        return None
    try:
        return parse_checkpoint_signal(text)
    except ConfigurationError as error:
        raise RequestRefused(f"label {error.detail}") from None

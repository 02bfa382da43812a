"""The data of events: one struct for each kind, from which the JSON Schemas are generated; and their size.

An event that receivers would refuse as too large loses its report, then its longest labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Struct, UnsetType, defstruct, field

from evalstop_service.domain.confidence_sequences import Estimate
from evalstop_service.domain.decision_lifecycle import Exploit, Guard
from evalstop_service.domain.health import MetricFault
from evalstop_service.domain.metric_rules import RuleBreach
from evalstop_service.domain.run import BestCheckpoint, Verdict
from evalstop_service.domain.statuses import Stage

Time = Annotated[datetime, Meta(tz=True)]
Url = Annotated[str, Meta(description="the page of the run or policy; missing without EVALSTOP_PUBLIC_URL")] | UnsetType


class Project(Struct):
    """The project."""

    id: UUID
    name: str


class Run(Struct):
    """The training job. Its labels identify the job to a scheduler; the longest are left out if an event cannot hold
    them all."""

    id: UUID
    name: str
    attempt: Annotated[int, Meta(description="1, and one more each time the run was resumed")]
    labels: dict[str, str]
    owner: Annotated[str | None, Meta(description="who is notified: an e-mail address, or any name")] = None
    group: Annotated[str | None, Meta(description="the runs that it is compared with")] = None
    last_step: Annotated[int | None, Meta(description="the highest step observed")] = None
    total_steps: Annotated[int | None, Meta(description="the planned length")] = None


class Decision(Struct):
    """The decision to stop the run, to park it, or to have it copy another one."""

    id: UUID
    action: Annotated[str, Meta(description="stop, park or exploit: what receivers should do")]
    state: str
    step: int
    due_at: Annotated[datetime, Meta(tz=True, description="the end of the veto window")]
    group: Annotated[str | None, Meta(description="the group whose rule decided; null: the policy or a person did")] = (
        None
    )


class Job(Struct):
    """The job of the run, which may hold other runs."""

    ends: Annotated[
        Literal["job", "step", "process"],
        Meta(
            description="what to end: the whole job or, because other runs in it go on, only the Slurm step or the "
            "process that the run's labels slurm_step_id or process_id name"
        ),
    ]
    other_runs: Annotated[list[str], Meta(description="names of other live runs in the job that are not to be stopped")]


class Health(Struct):
    """When the run last posted."""

    state: str
    last_seen_at: Time
    cadence_seconds: Annotated[float | None, Meta(description="the learned usual time between two posts")]


class Endpoint(Struct):
    """The endpoint under test."""

    id: UUID
    url: str


class Policy(Struct):
    """The policy whose rollout stage changed."""

    name: str
    version: int


class RolloutStage(Struct, kw_only=True, omit_defaults=True):
    """How much the policy may do, before and after the change, with the numbers behind it."""

    from_stage: Stage = field(name="from")
    to: Stage
    reason: str
    required_precision: Annotated[float, Meta(description="the lower bound that the precision must reach")]
    canary_share: Annotated[float, Meta(description="share of its stops that a canary carries out")]
    precision: Annotated[Estimate | None, Meta(description="of all cases of this version")] = None
    precision_since: Annotated[Estimate | None, Meta(description="of the cases since the last change of stage")] = None


class ProjectEvent(Struct, kw_only=True):
    """Something happened in a project."""

    project: Project


class _AboutRun(ProjectEvent, kw_only=True):
    run: Run
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None


class RunEvent(_AboutRun, kw_only=True):
    """Something happened to a run."""

    decision: None


class Alert(Struct):
    """What the trainer tells people."""

    id: UUID
    title: str
    text: str


class EvalRequest(Struct):
    """A paired evaluation: of the best checkpoint and of the current one, on the same prompts."""

    id: UUID
    step: Annotated[int, Meta(description="of the current checkpoint: the first that is registered from here on")]
    best_step: int
    best_uri: str
    multiplier: Annotated[int, Meta(description="the number of prompts, as a multiple of a usual eval")]
    seed: Annotated[int, Meta(description="both evals draw their prompts with this seed")]
    probability: Annotated[float | None, Meta(description="current probability that the run has turned")]
    deadline_at: Time


class DecisionEvent(_AboutRun, kw_only=True):
    """Something happened to a decision."""

    decision: Decision
    gpu_hours_left: Annotated[
        float | None, Meta(description="GPU-hours of the steps that are left, which a stop saves; null: not known")
    ]


class Digest(Struct):
    """A week of a project."""

    since: Annotated[datetime, Meta(tz=True, description="the beginning of the period")]
    until: Annotated[datetime, Meta(tz=True, description="the end of the period")]
    stops: Annotated[int, Meta(description="ended attempts whose stop was carried out")]
    right: Annotated[int, Meta(description="of these, right by later evals or people")]
    wrong: Annotated[int, Meta(description="of these, false")]
    recorded_only: Annotated[int, Meta(description="ended attempts whose stop was recorded only")]
    vetoes: Annotated[int, Meta(description="stops decided in the period that people vetoed")]
    to_label: Annotated[int, Meta(description="flagged attempts whose outcome is unknown: people can label them")]
    gpu_hours_saved: Annotated[float, Meta(description="by stops that were carried out and right")]
    gpu_hours_lost: Annotated[float, Meta(description="by false stops, estimated from held-out stops")]
    gpu_hours_would_have_saved: Annotated[float, Meta(description="by right stops that were recorded only")]
    ready: Annotated[list[str], Meta(description="moves of policies to a higher rollout stage that wait for an admin")]


FIELDS: dict[str, Any] = {
    "policy": Policy,
    "rollout_stage": RolloutStage,
    "digest": Digest,
    "endpoint": Endpoint,
    "health": Health,
    "metric_fault": MetricFault,
    "rule": RuleBreach,
    "alert": Alert,
    "request": Annotated[
        EvalRequest | None,
        Meta(description="null if any eval will do and no trainer declared that it answers requests"),
    ],
    "job": Job,
    "exploit": Exploit,
    "act_from_messages": Annotated[bool, Meta(description="messages to people hold a link to veto the stop")],
    "guards": list[Guard],
    "report": Annotated[
        dict[str, Any],
        Meta(description="the receiver's report, or how often the service asked without success"),
    ],
}
"""The fields that only some types of events have."""


def make_data(base: type[ProjectEvent], fields: Mapping[str, object], **more: object) -> ProjectEvent:
    """The data of a type of event: the fields of `base`, and `more` of `FIELDS`."""
    own, said = [(name, FIELDS[name]) for name in more], {"__doc__": base.__doc__}
    data: Any = defstruct(base.__name__, own, bases=(base,), namespace=said, kw_only=True)
    made: ProjectEvent = data(**fields, **more)
    return made


MOST_EVENT_BYTES = 64 * 1024

_ENVELOPE_BYTES = 1024
"""Reserved for the type and the time of an event."""


def fit_data(data: dict[str, Any]) -> dict[str, Any]:
    """Shorten the data of an event, given as JSON values, so that the event is smaller than `MOST_EVENT_BYTES`.

    Only two parts have no bound of their own: the report of a receiver, which may be nested, is left out, and then
    the longest labels. Short labels identify a job: 500 of 60 characters always stay.
    """
    most = MOST_EVENT_BYTES - _ENVELOPE_BYTES
    if "report" in data and _count_bytes(data) > most:
        data = data | {"report": {}}
    if "run" in data and _count_bytes(data) > most:
        labels = data["run"]["labels"]
        data = data | {"run": data["run"] | {"labels": {}}}
        data["run"]["labels"] = _select_shortest(labels, most - _count_bytes(data))
    return data


def _select_shortest(labels: dict[str, str], most: int) -> dict[str, str]:
    """The shortest labels that fit, in their original order."""
    selected: set[str] = set()
    for name in sorted(labels, key=lambda name: _count_bytes({name: labels[name]})):
        most -= _count_bytes({name: labels[name]})  # its braces stand for the comma
        if most < 0:
            break
        selected.add(name)
    return {name: value for name, value in labels.items() if name in selected}


def _count_bytes(document: Any) -> int:
    return len(json.dumps(document, separators=(",", ":")))

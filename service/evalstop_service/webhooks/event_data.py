"""What events hold: one struct for each kind of data, of which the JSON Schemas are made."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Struct, UnsetType, field

from evalstop_service.rules.confidence_sequences import Estimate
from evalstop_service.rules.metric_health import MetricFault
from evalstop_service.rules.run_results import BestCheckpoint, Verdict

Time = Annotated[datetime, Meta(tz=True)]
Stage = Literal["shadow", "canary", "enforce"]
Url = Annotated[str, Meta(description="the page of what it is about; missing without EVALSTOP_PUBLIC_URL")] | UnsetType


class Project(Struct):
    """The project."""

    id: UUID
    name: str


class Run(Struct):
    """The training job. Its labels identify the job to a scheduler; of more than an event can hold, the longest are
    left out."""

    id: UUID
    name: str
    attempt: Annotated[int, Meta(description="1, and one more each time the run was resumed")]
    labels: dict[str, str]
    owner: Annotated[str | None, Meta(description="who is told of it: an e-mail address, or any name")] = None
    group: Annotated[str | None, Meta(description="the runs that it is compared with")] = None


class Decision(Struct):
    """The decision to stop the run, or to park it."""

    id: UUID
    action: Annotated[str, Meta(description="stop, or park: what is asked of receivers")]
    state: str
    step: int
    due_at: Annotated[datetime, Meta(tz=True, description="the end of the veto window")]


class Guard(Struct):
    """A reason to hold a stop back."""

    kind: str
    reason: str
    details: dict[str, Any] = {}


class Health(Struct):
    """When the run last posted anything."""

    state: str
    last_seen_at: Time
    cadence_seconds: Annotated[float | None, Meta(description="learned: the usual time between two posts")]


class Endpoint(Struct):
    """The endpoint under test."""

    id: UUID
    url: str


class Policy(Struct):
    """The policy whose rollout stage changed."""

    name: str
    version: int


class RolloutStage(Struct, kw_only=True, omit_defaults=True):
    """How much the policy may do, before and after, with the numbers behind the change."""

    from_stage: Stage = field(name="from")
    to: Stage
    reason: str
    required_precision: Annotated[float, Meta(description="what the lower bound of the precision has to reach")]
    canary_share: Annotated[float, Meta(description="share of its stops that a canary carries out")]
    precision: Annotated[Estimate | None, Meta(description="of all cases of this version")] = None
    precision_since: Annotated[Estimate | None, Meta(description="of those since the last change of stage")] = None


class _AboutRun(Struct, kw_only=True):
    project: Project
    run: Run
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None


class RunEvent(_AboutRun, kw_only=True):
    """Something happened to a run."""

    decision: None


class EvalRequest(Struct):
    """A paired evaluation: of the best checkpoint and of the current one, on the same prompts."""

    id: UUID
    step: Annotated[int, Meta(description="of the current checkpoint: the first that is registered from here on")]
    best_step: int
    best_uri: str
    multiplier: Annotated[int, Meta(description="so many times the prompts of a usual eval")]
    seed: Annotated[int, Meta(description="from which both draw their prompts")]
    probability: Annotated[float | None, Meta(description="that the run has turned, as things stand")]
    deadline_at: Time


class EvalRequested(RunEvent, kw_only=True):
    """An evaluation is asked for; `request` is null where any eval would do, and nobody said to answer requests."""

    request: EvalRequest | None


class DecisionEvent(_AboutRun, kw_only=True):
    """Something happened to a decision."""

    decision: Decision


class StopOnHold(DecisionEvent, kw_only=True):
    """Guards put a stop on hold."""

    guards: list[Guard]


class StopReported(DecisionEvent, kw_only=True):
    """The stop came to an end; `report` is what the receiver said, or how often the service asked without success."""

    report: dict[str, Any]


class HealthChanged(RunEvent, kw_only=True):
    """A run went silent."""

    health: Health


class MetricFaultFound(RunEvent, kw_only=True):
    """A watched metric has no data."""

    metric_fault: MetricFault


class RolloutStageChanged(Struct):
    """A policy changed its rollout stage in a project, or may."""

    project: Project
    policy: Policy
    rollout_stage: RolloutStage


class EndpointTest(Struct):
    """An operator tests an endpoint."""

    project: Project
    endpoint: Endpoint


EventData = RunEvent | DecisionEvent | RolloutStageChanged | EndpointTest

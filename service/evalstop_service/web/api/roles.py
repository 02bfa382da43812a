"""Metric roles in requests, and their routes: the metrics of a run, and corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar, cast

from evalstop_detectors import ROLES, MetricRole, choose_direction
from evalstop_detectors.roles.recognition import MOST_EVALS
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from evalstop_service.domain.fields import Body, Name, Plain
from evalstop_service.domain.run import MetricFields
from evalstop_service.ingest import Message, RolesCorrected
from evalstop_service.runs.watched_metrics import list_watched
from evalstop_service.store import observations, projects, runs
from evalstop_service.store.observations import LatestObservation
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.run_views import RunOut, view_run
from evalstop_service.web.api.schemas import Answer, Items, RunId, Stored, answers
from evalstop_service.web.context import Ctx, Db, Now, Operate, Read, allowed

AnyRole = TypeVar("AnyRole", bound="WeighedRole")

_OF_SERVICE = (MetricRole.LEARNING_RATE, MetricRole.PAIRED)
"""The roles of metrics that the service finds or writes by itself."""

if TYPE_CHECKING:
    RoleName = str
else:
    RoleName = Literal[tuple(role.value for role in ROLES if role not in _OF_SERVICE)]


def _check_unique_roles(metrics: dict[str, AnyRole]) -> dict[str, AnyRole]:
    roles = [role.role for role in metrics.values()]
    twice = {role for role in roles if roles.count(role) > 1 and role != "eval"}
    if twice:
        raise ValueError(f"only the role eval may have several metrics, but so has {', '.join(sorted(twice))}")
    if roles.count("eval") > MOST_EVALS:
        raise ValueError(f"a run may have at most {MOST_EVALS} evals")
    return metrics


class WeighedRole(Body):
    """The role of a metric, and the weight of an eval among several."""

    role: RoleName = Field(
        description="eval: what people care about, and what decides; proxy: what training maximizes in its place; kl: "
        "the distance to the initial policy; loss: what training minimizes; entropy, length, truncated (the "
        "share of truncated or malformed answers) and gradient_norm: these may only raise a suspicion"
    )
    direction: Literal["maximize", "minimize"] | None = Field(
        None,
        description="which direction is better; by default kl, losses and errors by the words of their name, such "
        "as eval_loss or failure_rate, are minimized, others maximized",
    )
    weight: Annotated[float, Field(ge=0.001, le=1000)] | None = Field(
        None, description="with several evals: its weight in the mean that judges the run; default 1"
    )
    critical: bool = Field(
        False, description="with several evals: if this one falls for good, the run is stopped, whatever the mean does"
    )
    required: bool = Field(
        False,
        description="with several evals: the run is stopped only once this one and all other required ones have turned",
    )

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if self.role != "eval" and (self.weight is not None or self.critical or self.required):
            raise ValueError("only an eval has a weight, is critical or is required")
        return self


EvalVersion = Annotated[str, Field(min_length=1, max_length=100), Plain]

Roles = Annotated[dict[Name, WeighedRole], Field(max_length=100), AfterValidator(_check_unique_roles)]


class DeclaredRole(WeighedRole):
    """The role of a metric, and the version of an eval."""

    version: EvalVersion | None = Field(
        None,
        description="of an eval: a name for how it is measured (grader, eval set, number of prompts). A different one "
        "than recorded means that the measurement changes from the next step on",
    )

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.version is not None and self.role != "eval":
            raise ValueError("only the metric with the role eval has a version")
        return self


DeclaredRoles = Annotated[dict[Name, DeclaredRole], Field(max_length=100), AfterValidator(_check_unique_roles)]
Watched = Annotated[
    Annotated[DeclaredRoles, Tag("~one")] | Annotated[Literal["auto"], Tag("~other")],
    Discriminator(lambda value: "~other" if isinstance(value, str) else "~one"),
]


def complete_directions(metrics: Mapping[str, WeighedRole]) -> dict[str, MetricFields]:
    """Fill in missing directions: KL, losses and errors by their words are minimized."""
    completed: dict[str, MetricFields] = {}
    for metric, role in metrics.items():
        direction = role.direction or choose_direction(MetricRole(role.role), metric)
        of_eval = role.model_dump(include={"weight", "critical", "required"}, exclude_defaults=True)
        completed[metric] = cast("MetricFields", {"role": role.role, "direction": direction, **of_eval})
    return completed


def read_eval_version(metrics: Mapping[str, DeclaredRole]) -> str | None:
    """The version of the evals; with several evals it includes their names, since each may change."""
    version_of_metric = {metric: role.version for metric, role in sorted(metrics.items()) if role.version}
    if sum(role.role == "eval" for role in metrics.values()) == 1:
        return next(iter(version_of_metric.values()), None)
    return ", ".join(f"{metric}: {version}" for metric, version in version_of_metric.items()) or None


router = create_router()


class MetricsIn(Body):
    """All metrics of a run that have a role."""

    metrics: Roles = Field(
        description="by metric; metrics that are not named lose their roles",
        examples=[{"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}}],
    )


@answers(LatestObservation)
class MetricOut(Answer):
    """A metric that a run has reported."""

    role: str | None = Field(description="eval, proxy, kl or loss; null: it is stored but not watched")
    value: Stored = Field(description="value at that step")


@router.get("/runs/{run_id}/metrics", tags=["runs"])
def list_run_metrics(run_id: RunId, caller: Read, database: Db) -> Items[MetricOut]:
    """Every metric that the run has reported, with its role and its last value, by name."""
    with database.reading() as tx:
        run = runs.load_run(tx, caller.project_id, run_id)
        roles, latest = list_watched(run), observations.list_latest(tx, run)
    items = [vars(item) | {"role": roles[item.metric]["role"] if item.metric in roles else None} for item in latest]
    return Items[MetricOut].model_validate({"items": items})


@router.patch("/runs/{run_id}/metrics", tags=["runs"])
def correct_run_metrics(run_id: RunId, body: MetricsIn, caller: Operate, context: Ctx, now: Now) -> RunOut:
    """Set the roles of all metrics. The run is judged again from its first observation.

    Automatic recognition is turned off for the run. In a project with `second_person` this needs the scope `admin`.
    """
    with context.database.reading() as tx:
        if projects.get_project(tx, caller.project_id).second_person:
            allowed(caller.key, "admin")
    correction = RolesCorrected(complete_directions(body.metrics), caller.actor)
    receipt = context.committer.submit_and_wait(Message(caller.project_id, run_id, correction))
    with context.database.reading() as tx:
        return view_run(tx, receipt.run, context, now)

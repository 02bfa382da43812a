"""Settings of a project: their limits, and the functions that create a project and change its settings.

The API, the dashboard and the command line all use these. Every change is in the audit log.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.projects import policies
from evalstop_service.rules import decision_lifecycle
from evalstop_service.rules.fields import Body, Integral, Line, Mode, Name, Role
from evalstop_service.rules.quotas import LEAST_METRICS, Quotas
from evalstop_service.rules.random_assignment import HELD_OUT_SHARE
from evalstop_service.store import audit, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project

Retention = Annotated[int, Field(ge=1, le=36_500), Integral]
Wait = Annotated[float, Field(ge=1, le=30 * 86400, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86400, allow_inf_nan=False)]
Evals = Annotated[int, Field(ge=0, le=1_000_000), Integral]
GpuHours = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
PerDay = Annotated[int, Field(ge=1, le=1_000_000), Integral]
PerHour = Annotated[int, Field(ge=1, le=1_000_000), Integral]
Share = Annotated[float, Field(gt=0, le=1)]
ShareOrNone = Annotated[float, Field(ge=0, le=1)]
Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
AllowedPolicies = Annotated[list[Annotated[Line, Field(min_length=1)]], Field(max_length=100)]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", examples=["USD"])]

Most = Annotated[int, Field(ge=1, le=100_000_000), Integral]
DEFAULTS = Quotas()

_COUNTS = "that an attempt must have to count towards a rollout stage"


class ProjectChange(Body):
    """New settings. An omitted field keeps its value, and so does null in fields that cannot be null."""

    default_policy: Line | None = Field(None, description="policy of runs that request none: NAME or NAME@VERSION")
    default_mode: Mode | None = Field(None, description="mode of runs that request none")
    max_mode: Mode | None = Field(None, description="highest mode that runs may request: shadow or enforce")
    allowed_policies: AllowedPolicies | None = Field(
        None,
        description="policies that runs may request in addition to default_policy, as NAME or NAME@VERSION; null: any",
    )
    veto_window_seconds: Seconds | None = Field(None, description="how long a stop can be vetoed before it is sent")
    retention_days: Retention | None = Field(
        None, description="how long the details of a run are kept after its end; null: forever"
    )
    stops_per_hour: PerHour | None = Field(None, description="maximum number of stops per hour; null: no limit")
    stops_share: Share | None = Field(
        None, description="maximum share of runs stopped per hour, but always one; null: no limit"
    )
    confirm_seconds: Wait | None = Field(
        None, description="how long a stop may stay unconfirmed before it is escalated"
    )
    stale_seconds: Wait | None = Field(None, description="minimum silence before a run is stale")
    held_out_share: ShareOrNone | None = Field(
        None, description="share of stops held out at random, to measure whether they are right"
    )
    second_person: bool | None = Field(
        None, description="actions that end jobs, or allow more jobs to be ended, require two people"
    )
    case_seconds: Seconds | None = Field(
        None, description="how long an attempt must last to count towards a rollout stage"
    )
    case_evals: Evals | None = Field(None, description=f"number of finite evals {_COUNTS}")
    case_gpu_hours: GpuHours | None = Field(None, description=f"GPU-hours, if known, {_COUNTS}")
    cases_per_key_and_day: PerDay | None = Field(
        None, description="maximum number of cases that count per key and day (UTC)"
    )
    price_per_gpu_hour: Price | None = Field(None, description="price of one GPU hour; null: not set")
    currency: Currency | None = Field(None, description="currency of the price, by ISO 4217")


class NewProject(ProjectChange):
    """A new project. An omitted field gets its default, and so does null in fields that cannot be null.

    Its stops are only recorded unless `max_mode` is `enforce`; the default of `max_mode` is `default_mode`.
    """

    name: Name = Field(description="unique in the installation", examples=["alignment"])


class QuotasIn(Body):
    """Limits on what the project may have."""

    open_runs: Most = Field(DEFAULTS.open_runs, description="runs that have not ended")
    runs_per_day: Most = Field(DEFAULTS.runs_per_day, description="runs opened in a day (UTC)")
    metrics_per_run: Annotated[int, Field(ge=LEAST_METRICS, le=100_000_000), Integral] = Field(
        DEFAULTS.metrics_per_run, description="distinct names in one run"
    )
    keys: Most = Field(DEFAULTS.keys, description="valid keys")
    endpoints: Most = Field(DEFAULTS.endpoints, description="webhooks and pull endpoints")
    policies: Most = Field(DEFAULTS.policies, description="versions added or used")


NULLABLE = ("allowed_policies", "retention_days", "stops_per_hour", "stops_share", "price_per_gpu_hour")
"""Settings whose value may be null."""

WIDER_IF_MORE = ("max_mode", "default_mode", "stops_per_hour", "stops_share", "stale_seconds")
WIDER_IF_LESS = ("second_person", "veto_window_seconds", "held_out_share")
"""Settings that permit more stops if they are raised, or lowered; null is no limit."""


def _check_brackets(pattern: str) -> str:
    if pattern.count("[") > pattern.count("]"):
        raise ValueError("a [ is not closed; write [[] for a literal [")
    return pattern


class RolePattern(Role):
    """The role of all metrics whose name matches."""

    pattern: Annotated[Name, AfterValidator(_check_brackets)] = Field(
        description="* is any text, ? any character, [ab] one of these; upper and lower case differ",
        examples=["val-core/*/mean@*"],
    )


class RolePatterns(Body):
    """The role patterns of a project: the first that matches a name counts; each role goes to the first match."""

    role_patterns: Annotated[list[RolePattern], Field(max_length=100)] = Field(
        description="in the order in which they are tried"
    )


_Body = TypeVar("_Body", bound=Body)


def parse_form(model: type[_Body], values: Mapping[str, Any]) -> _Body:
    """Validate text values, as from an HTML form; raises Invalid, which names the field."""
    try:
        return model.model_validate(dict(values), strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        field = " ".join(str(part) for part in first["loc"])
        fault = first["msg"].removeprefix("Value error, ")
        raise Invalid(f"{field}: {fault}", str(first["loc"][0]) if first["loc"] else None, fault) from None


def create_project(database: Database, settings: NewProject, actor: str, now: datetime) -> Project:
    """Create a project; raises Conflict if its name is taken, Invalid if its default policy does not exist."""
    with database.transaction() as tx:
        return insert_project(tx, settings, actor, now)


def insert_project(tx: Transaction, settings: NewProject, actor: str, now: datetime) -> Project:
    """Like `create_project`, within a transaction."""
    default = Project(
        new_id(),
        settings.name,
        default_policy=policies.DEFAULT_POLICY,
        default_mode=decision_lifecycle.Mode.SHADOW,
        veto_window_seconds=0.0,
        created_at=now,
        seed=secrets.token_hex(16),
        held_out_share=HELD_OUT_SHARE,
        max_mode=settings.default_mode or decision_lifecycle.Mode.SHADOW,
    )
    project = replace(default, **_list_values(settings))
    _check_modes(project)
    if not projects.add_project(tx, project):
        raise Conflict(f"a project called {project.name!r} already exists")
    policies.store_referred_policy(tx, project, project.default_policy, now)
    audit.record_action(tx, project.id, actor, "project.created", f"project {project.name}", None, now)
    return project


def _list_values(change: ProjectChange) -> dict[str, Any]:
    values = change.model_dump(exclude_none=True)
    return values | {name: getattr(change, name) for name in NULLABLE if name in change.model_fields_set}


def find_project(database: Database, name: str) -> Project:
    """The project with this name; raises NotFound."""
    with database.reading() as tx:
        project = projects.find_project_by_name(tx, name)
    if project is None:
        raise NotFound(f"there is no project {name!r}; `evalstop admin project create` creates one")
    return project


def apply_change(tx: Transaction, author: Author, change: ProjectChange) -> Project:
    """Change settings of a project; raises Invalid if its default policy does not exist, Conflict if its modes
    contradict each other, so that nothing could be stopped."""
    values = _list_values(change)
    before = projects.lock_project(tx, author.project_id)
    project = replace(before, **values)
    _check_modes(project)
    policies.store_referred_policy(tx, project, project.default_policy, author.at)
    changed = {name: value for name, value in values.items() if getattr(before, name) != value}
    if changed:
        projects.update_project(tx, project)
        author.record(tx, "project.changed", f"project {project.name}", changed)
    return project


def set_quotas(database: Database, author: Author, quotas: QuotasIn) -> Project:
    """Set the quotas of a project; raises NotFound. For operators of the installation, not for project members."""
    with database.transaction() as tx:
        if projects.find_project(tx, author.project_id) is None:
            raise NotFound(f"there is no project {author.project_id}")
        before = projects.lock_project(tx, author.project_id)
        project = replace(before, quotas=Quotas(**quotas.model_dump()))
        if project != before:
            projects.update_project(tx, project)
            author.record(tx, "project.quotas_set", f"project {project.name}", quotas.model_dump())
    return project


def describe_widening(project: Project, change: ProjectChange) -> str:
    """The settings by which a change permits more jobs to be ended, or by fewer people; empty: none."""
    after = replace(project, **_list_values(change))
    widened = [name for name in WIDER_IF_MORE if _bound(project, name) < _bound(after, name)]
    widened += [name for name in WIDER_IF_LESS if _bound(project, name) > _bound(after, name)]
    if after.default_policy != project.default_policy:
        widened.append("default_policy")
    if project.allowed_policies is not None:
        allowed = after.allowed_policies
        if allowed is None or not all(policies.is_allowed(project, reference) for reference in allowed):
            widened.append("allowed_policies")
    return ", ".join(f"{name} = {_format_value(getattr(after, name))}" for name in widened)


def _bound(project: Project, name: str) -> float:
    value: float | decision_lifecycle.Mode | None = getattr(project, name)
    if isinstance(value, decision_lifecycle.Mode):
        return value is decision_lifecycle.Mode.ENFORCE
    return math.inf if value is None else value


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "none" if value is None else "no" if value is False else str(value)


def _check_modes(project: Project) -> None:
    if project.default_mode is decision_lifecycle.Mode.ENFORCE and project.max_mode is not project.default_mode:
        raise Conflict("default_mode is enforce but max_mode is shadow, which allows no stops: change both")


def change_role_patterns(database: Database, author: Author, change: RolePatterns) -> Project:
    """Replace the role patterns of a project. Open runs apply them when a metric is reported for the first time."""
    patterns = [pattern.model_dump(exclude_none=True) for pattern in change.role_patterns]
    with database.transaction() as tx:
        project = replace(projects.lock_project(tx, author.project_id), role_patterns=patterns)
        projects.update_project(tx, project)
        author.record(tx, "project.changed", f"project {project.name}", {"role_patterns": patterns})
    return project

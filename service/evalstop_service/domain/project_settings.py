"""The settings and quotas of a project, each declared once: type and bounds, default and meaning. Pure.

The columns of the table, the bodies and answers of the API, the form on the page, what needs a second person and a
table of the documentation are derived from `ProjectSettings`.

Only cases of real runs count towards a rollout stage: anyone with an ingest key can open many tiny runs that turn at
will.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct
from pydantic import BeforeValidator, Field, WithJsonSchema

from evalstop_service.domain.confidence_sequences import HELD_OUT_SHARE
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.fields import Integral, Line, Rule
from evalstop_service.domain.metric_rules import PATTERN as PATTERN_OF_RULES
from evalstop_service.domain.metric_rules import parse_rule
from evalstop_service.domain.times import EXAMPLE, PATTERN, StopHours, format_duration, parse_duration


class Group(StrEnum):
    """The groups of settings on the page, in order."""

    NEW_RUNS = "New runs"
    STOPPING = "Stopping"
    GUARDS = "Guards"
    CASES = "Cases that count towards a rollout stage"
    RETENTION = "Retention"
    NOTICES = "Notices"


@dataclass(frozen=True)
class Setting:
    """What a setting means. `widens`: whether more or less of it permits more stops, or lets fewer people prevent them
    (null is no limit); None: neither, or by a rule of its own. `empty`: what null means; None: it cannot be null."""

    group: Group
    label: str
    description: str
    widens: Literal["more", "less"] | None = None
    empty: str | None = None


def read_seconds(written: Any) -> Any:
    """Seconds, from a duration such as `15m`; raises ValueError."""
    if not isinstance(written, str) or written.replace(".", "", 1).isdecimal():
        return written
    return parse_duration(written)


def _describe_seconds(least: int) -> WithJsonSchema:
    number = {"type": "number", "minimum": least, "maximum": 30 * 86_400}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": PATTERN}]})


Wait = Annotated[
    float, Field(ge=1, le=30 * 86_400, allow_inf_nan=False), BeforeValidator(read_seconds), _describe_seconds(1)
]
Seconds = Annotated[
    float, Field(ge=0, le=30 * 86_400, allow_inf_nan=False), BeforeValidator(read_seconds), _describe_seconds(0)
]
RuleText = Annotated[str, Rule(lambda text: parse_rule(text).text, {"pattern": PATTERN_OF_RULES})]
Count = Annotated[int, Field(ge=1, le=1_000_000), Integral]


def check_different(names: list[str]) -> list[str]:
    """The names; raises ValueError when two are the same."""
    if len(set(names)) < len(names):
        raise ValueError("name each one once")
    return names


_NEW_RUNS, _STOPPING, _GUARDS, _CASES, _RETENTION, _NOTICES = Group


@dataclass(frozen=True, kw_only=True)
class ProjectSettings:
    """The settings of a project, with the defaults of a new one."""

    default_policy: Annotated[
        Line, Setting(_NEW_RUNS, "Policy", "policy of runs that request none: NAME or NAME@VERSION")
    ] = "default"
    default_mode: Annotated[
        Mode,
        Field(strict=False),
        Setting(_NEW_RUNS, "Mode", "mode of runs that request none; shadow: stops are only recorded", widens="more"),
    ] = Mode.SHADOW
    max_mode: Annotated[
        Mode,
        Field(strict=False),
        Setting(
            _NEW_RUNS,
            "Highest mode",
            "highest mode that runs may request; shadow: nothing is stopped, whatever trainers request",
            widens="more",
        ),
    ] = Mode.SHADOW
    allowed_policies: Annotated[
        Annotated[list[Annotated[Line, Field(min_length=1)]], Field(max_length=100)] | None,
        Setting(
            _NEW_RUNS,
            "Allowed policies",
            "policies that runs may request in addition to default_policy, as NAME or NAME@VERSION",
            empty="any",
        ),
    ] = None
    panel: Annotated[
        Annotated[list[Line], Field(max_length=16), Rule(check_different, {"uniqueItems": True})] | None,
        Setting(
            _NEW_RUNS,
            "Panel",
            "detectors that observe runs under the shipped policies and decide nothing; a change adds a version to each"
            " of these policies",
            empty="shipped",
        ),
    ] = None
    veto_window_seconds: Annotated[
        Seconds, Setting(_STOPPING, "Veto window", "how long people can veto a stop before it goes out", widens="less")
    ] = 900.0
    stop_hours: Annotated[
        StopHours | None,
        Setting(
            _STOPPING,
            "Stop hours",
            f"hours in which stops may go out, such as {EXAMPLE!r}; others wait until these begin",
            empty="always",
        ),
    ] = None
    act_from_messages: Annotated[
        bool,
        Setting(
            _STOPPING,
            "Act from messages",
            "messages to people hold a link by which they can veto the stop, or have it wait, without signing in",
            widens="less",
        ),
    ] = True
    confirm_seconds: Annotated[
        Wait,
        Setting(
            _STOPPING, "Confirmation", "how long a stop may stay unconfirmed before it is escalated", widens="less"
        ),
    ] = 900.0
    second_person: Annotated[
        bool,
        Setting(
            _STOPPING,
            "Second person",
            "actions that end jobs, and changes that allow more jobs to be ended, require two people",
            widens="less",
        ),
    ] = False
    held_out_share: Annotated[
        float,
        Field(ge=0, le=1),
        Setting(
            _STOPPING,
            "Held out (0 to 1)",
            "share of stops held out at random, to measure whether they are right",
            widens="less",
        ),
    ] = HELD_OUT_SHARE
    stops_per_hour: Annotated[
        Count | None,
        Setting(_GUARDS, "Stops per hour", "maximum number of stops per hour", widens="more", empty="no limit"),
    ] = 30
    stops_share: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Setting(
            _GUARDS,
            "Share of the runs (0 to 1)",
            "maximum share of runs (running, or stopped in the last hour) stopped per hour, but always one; checked "
            "from 10 stops or 20 runs on",
            widens="more",
            empty="no limit",
        ),
    ] = 0.5
    stale_seconds: Annotated[
        Wait, Setting(_GUARDS, "Stale after", "minimum silence before a run is stale", widens="more")
    ] = 300.0
    case_seconds: Annotated[
        Seconds, Setting(_CASES, "Duration", "shorter attempts do not count towards a rollout stage", widens="less")
    ] = 600.0
    case_evals: Annotated[
        int,
        Field(ge=0, le=1_000_000),
        Integral,
        Setting(
            _CASES, "Evals", "attempts with fewer finite evals do not count towards a rollout stage", widens="less"
        ),
    ] = 8
    cases_per_key_and_day: Annotated[
        Count,
        Setting(
            _CASES, "Cases per key and day", "maximum number of cases that count per key and day (UTC)", widens="more"
        ),
    ] = 20
    retention_days: Annotated[
        Annotated[int, Field(ge=1, le=36_500), Integral] | None,
        Setting(
            _RETENTION, "Retention (days)", "how long the details of a run are kept after its end", empty="forever"
        ),
    ] = None
    rules: Annotated[
        Annotated[list[RuleText], Field(max_length=20)] | None,
        Setting(
            _NOTICES,
            "Rules",
            "rules on metrics of runs, such as 'kl > 20', 'loss change > 0.5 over 20', 'grad_norm z_score > 6' and "
            "'eval absent_for 2h', which are announced as run.rule_met and stop nothing",
            empty="none",
        ),
    ] = None


@dataclass(frozen=True)
class Declared:
    """A declared setting: its name, type with bounds, bare type, default and meaning."""

    name: str
    annotation: Any
    bare: Any
    default: Any
    setting: Setting

    @property
    def is_nullable(self) -> bool:
        """Whether its value may be null."""
        return self.setting.empty is not None

    @property
    def is_duration(self) -> bool:
        """Whether its value is a number of seconds, written as a duration."""
        return self.name.endswith("_seconds")

    @property
    def is_list(self) -> bool:
        """Whether its value is a list of texts."""
        return any(get_origin(part) is list for part in get_args(self.bare))

    @property
    def description(self) -> str:
        """What it means, and what null means."""
        null = f"; null: {self.setting.empty}" if self.is_nullable else ""
        return f"{self.setting.description}{null}"


@cache
def list_settings() -> tuple[Declared, ...]:
    """All settings, in the order of the page."""
    annotations = get_type_hints(ProjectSettings, include_extras=True)
    bare = get_type_hints(ProjectSettings)
    declared = []
    for field in dataclasses.fields(ProjectSettings):
        (setting,) = (item for item in get_args(annotations[field.name]) if isinstance(item, Setting))
        declared.append(Declared(field.name, annotations[field.name], bare[field.name], field.default, setting))
    return tuple(declared)


def list_widened(before: ProjectSettings, after: ProjectSettings) -> list[str]:
    """The names of settings that a change lets permit more stops; those of policies depend on the project's own."""
    widened = []
    for declared in list_settings():
        old, new = (_bound(getattr(settings, declared.name)) for settings in (before, after))
        if (declared.setting.widens == "more" and old < new) or (declared.setting.widens == "less" and old > new):
            widened.append(declared.name)
    if before.stop_hours not in (None, after.stop_hours):  # other hours hold some stop back no longer
        widened.append("stop_hours")
    return widened


def _bound(value: Any) -> float:
    if isinstance(value, Mode):
        return value is Mode.ENFORCE
    if isinstance(value, str | list | StopHours):
        return 0.0  # not compared
    return math.inf if value is None else float(value)


def format_value(name: str, value: object) -> str:
    """A value as people write it."""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return format_duration(value, parts=4) if name.endswith("_seconds") else str(int(value))
    return "none" if value is None else str(value)


LEAST_METRICS = 100
"""The lowest possible quota of metrics: below it they are not counted."""


def _limit(description: str, least: int = 1) -> Meta:
    return Meta(ge=least, le=100_000_000, description=description)


class Quotas(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what a project may have, so that no project fills the installation."""

    open_runs: Annotated[int, _limit("runs that have not ended")] = 10_000
    runs_per_day: Annotated[int, _limit("runs opened in a day (UTC)")] = 50_000
    metrics_per_run: Annotated[int, _limit("distinct names in one run", LEAST_METRICS)] = 5_000
    keys: Annotated[int, _limit("valid keys")] = 1_000
    endpoints: Annotated[int, _limit("webhooks and pull endpoints")] = 200
    policies: Annotated[int, _limit("versions")] = 1_000
    experiments: Annotated[int, _limit("experiments of MLflow clients")] = 1_000
    artifact_gigabytes: Annotated[int, _limit("of MLflow artifacts stored here")] = 1_000

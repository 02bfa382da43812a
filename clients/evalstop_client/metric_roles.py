"""The roles of metrics, as a trainer declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Required, TypedDict, get_args

from evalstop_client.config import LONGEST_NAME, fit_line, replace_controls
from evalstop_client.errors import ConfigurationError

Role = Literal["eval", "proxy", "kl", "loss", "entropy", "length", "truncated", "gradient_norm"]
Direction = Literal["maximize", "minimize"]


class MetricRole(TypedDict, total=False):
    """The role of a metric; its direction, by default minimize for KL, losses and errors such as `failure_rate` and
    maximize for others; the version of the eval; and with several evals the weight in their mean, by default 1,
    whether the run is stopped when this one falls for good, and whether only if it and all other required ones do."""

    role: Required[Role]
    direction: Direction
    version: str
    weight: float
    critical: bool
    required: bool


AUTO: Final = "auto"  # the service recognizes the roles of metrics by their names

Metrics = Mapping[str, MetricRole] | Literal["auto"]
"""Roles by metric; or `"auto"`: the service recognizes the roles by the names."""

METRIC_ROLES: tuple[Role, ...] = get_args(Role)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
MOST_EVALS, LONGEST_VERSION = 32, 100
FIELDS = {"role", "direction", "version", "weight", "critical", "required"}


def check_metrics(metrics: Metrics) -> dict[str, MetricRole] | Literal["auto"]:
    """Check the metrics and return them for the API; raises ConfigurationError."""
    if metrics == AUTO:
        return AUTO
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(f'metrics {metrics!r:.80}: name the role of each metric, or write "auto".')
    role_of_metric: dict[str, str] = {}
    for name, role in metrics.items():
        if not isinstance(name, str) or not name or name != fit_line(name):
            raise ConfigurationError(f"metrics {name!r:.80}: a name has 1 to {LONGEST_NAME} characters, on one line.")
        if not isinstance(role, Mapping) or not role.keys() <= FIELDS:
            raise ConfigurationError(
                f'metrics {name!r}: write {{{name!r}: {{"role": "eval", "direction": "maximize"}}}}.'
            )
        metric_role, direction = role.get("role"), role.get("direction")
        if metric_role not in METRIC_ROLES:
            raise ConfigurationError(
                f"metrics {name!r}: role {metric_role!r}; choose one of {', '.join(METRIC_ROLES)}."
            )
        if direction is not None and direction not in DIRECTIONS:
            raise ConfigurationError(f"metrics {name!r}: direction {direction!r}; choose {' or '.join(DIRECTIONS)}.")
        _check_version(name, role)
        _check_weight(name, role)
        if metric_role in role_of_metric and metric_role != "eval":
            raise ConfigurationError(
                f"metrics: {role_of_metric[metric_role]!r} and {name!r} both claim the role {metric_role!r}."
            )
        role_of_metric[metric_role] = name
    if (evals := sum(role["role"] == "eval" for role in metrics.values())) > MOST_EVALS:
        raise ConfigurationError(f"metrics: {evals} evals are too many; at most {MOST_EVALS}.")
    return {name: MetricRole(**role) for name, role in metrics.items()}


def _check_version(name: str, role: MetricRole) -> None:
    version = role.get("version")
    if version is not None and (role["role"] != "eval" or not isinstance(version, str)):
        raise ConfigurationError(f"metrics {name!r}: version {version!r}; only the eval has one, a text.")
    if version is not None and (not version or version != replace_controls(version, "\n\t")[:LONGEST_VERSION]):
        raise ConfigurationError(
            f"metrics {name!r}: version {version!r:.80}; it has 1 to {LONGEST_VERSION} printable characters."
        )


def _check_weight(name: str, role: MetricRole) -> None:
    weight, flags = role.get("weight"), {flag: role.get(flag, False) for flag in ("critical", "required")}
    if role["role"] != "eval" and (weight is not None or any(flags.values())):
        raise ConfigurationError(f"metrics {name!r}: only an eval has a weight, is critical or is required.")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0.001 <= weight <= 1000):
        raise ConfigurationError(f"metrics {name!r}: weight {weight!r}; it must be a number from 0.001 to 1000.")
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"metrics {name!r}: {flag} {value!r}; it is True or False.")

"""The roles of metrics, as a trainer declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Required, TypedDict, get_args

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


def check_metrics(metrics: Metrics) -> dict[str, MetricRole] | Literal["auto"]:
    """Return the metrics for the API, which checks the rest; raises ConfigurationError for what is easily mistyped."""
    if metrics == AUTO:
        return AUTO
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(f'metrics {metrics!r:.80}: name the role of each metric, or write "auto".')
    for name, role in metrics.items():
        if not isinstance(role, Mapping) or not role.keys() <= MetricRole.__annotations__.keys():
            raise ConfigurationError(
                f'metrics {name!r}: write {{{name!r}: {{"role": "eval", "direction": "maximize"}}}}.'
            )
        if role.get("role") not in METRIC_ROLES:
            raise ConfigurationError(
                f"metrics {name!r}: role {role.get('role')!r}; choose one of {', '.join(METRIC_ROLES)}."
            )
        if role.get("direction") not in (None, *DIRECTIONS):
            raise ConfigurationError(
                f"metrics {name!r}: direction {role['direction']!r}; choose {' or '.join(DIRECTIONS)}."
            )
    return {name: MetricRole(**role) for name, role in metrics.items()}

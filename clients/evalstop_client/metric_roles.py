"""What metrics mean for a run, as a trainer declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Required, TypedDict, get_args

from evalstop_client.errors import ConfigurationError

Role = Literal["eval", "proxy", "kl", "loss"]
Direction = Literal["maximize", "minimize"]


class MetricRole(TypedDict, total=False):
    """The role of a metric; the better direction, by default down for KL and loss and up for the others; and what the
    measurement of the eval is called."""

    role: Required[Role]
    direction: Direction
    version: str


AUTO: Final = "auto"  # the service recognises the roles of metrics by their names

Metrics = Mapping[str, MetricRole] | Literal["auto"]
"""By metric; or `"auto"`: the service tells the roles from the names."""

METRIC_ROLES: tuple[Role, ...] = get_args(Role)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
FIELDS = {"role", "direction", "version"}


def check_metrics(metrics: Metrics) -> dict[str, MetricRole] | Literal["auto"]:
    """The metrics as the API takes them; raises ConfigurationError."""
    if metrics == AUTO:
        return AUTO
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(f'metrics {metrics!r:.80}: name the role of each metric, or write "auto".')
    taken: dict[str, str] = {}
    for name, role in metrics.items():
        if not isinstance(name, str) or not name or not isinstance(role, Mapping) or not role.keys() <= FIELDS:
            raise ConfigurationError(
                f'metrics {name!r}: write {{"gold": {{"role": "eval", "direction": "maximize"}}}}.'
            )
        metric_role, direction = role.get("role"), role.get("direction")
        if metric_role not in METRIC_ROLES:
            raise ConfigurationError(
                f"metrics {name!r}: role {metric_role!r}; choose one of {', '.join(METRIC_ROLES)}."
            )
        if direction is not None and direction not in DIRECTIONS:
            raise ConfigurationError(f"metrics {name!r}: direction {direction!r}; choose {' or '.join(DIRECTIONS)}.")
        if role.get("version") is not None and (metric_role != "eval" or not isinstance(role["version"], str)):
            raise ConfigurationError(f"metrics {name!r}: version {role['version']!r}; only the eval has one, a text.")
        if metric_role in taken:
            raise ConfigurationError(
                f"metrics: {taken[metric_role]!r} and {name!r} both claim the role {metric_role!r}."
            )
        taken[metric_role] = name
    return {name: MetricRole(**role) for name, role in metrics.items()}

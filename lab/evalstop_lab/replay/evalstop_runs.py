"""Reads runs from an EvalStop service: those of the project of the key in `EVALSTOP_KEY`.

A metric has the role that its run gave it, unless an option overrides it; several evals are read as their mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evalstop_detectors import MetricRole
from evalstop_service.rules.role_recognition import COMBINED_METRIC

from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.cells import add_row, parse_gpus, parse_number, parse_step
from evalstop_lab.replay.remote import Remote
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

RUNS_A_PAGE = 200
POINTS_A_PAGE = 1000


@dataclass(frozen=True)
class ServiceRun:
    """A run as the service lists it."""

    remote: Remote
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def roles(self) -> Roles:
        """The roles that the run gave its metrics."""
        return read_roles(self.document["metrics"])

    def read(self, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Fetch the observations that count, without those of superseded attempts."""
        run = runs.run(self.name, roles)
        run.total_steps = self.document.get("total_steps")
        run.eval_changes = [int(change["step"]) for change in self.document.get("eval_changes", ())]
        started, ended = (datetime.fromisoformat(self.document[key] or self.document["updated_at"]) for key in _MOMENTS)
        run.seconds = max((ended - started).total_seconds(), 0.0)
        run.gpus = parse_gpus(str(self.document.get("labels", {}).get("gpus", "")))
        for column in roles.columns.values():
            for point in self._read_values(column):
                if point["superseded_by"] is not None:
                    continue
                try:
                    row = {column: point["value"], f"{column}_stderr": point["stderr"]}
                    add_row(run, parse_step(point["step"]), row, parse_number)
                except ValueError as error:
                    errors.add(UnreadableInput(f"{self.remote.url}, run {self.name}", str(error)))

    def _read_values(self, metric: str) -> Iterator[dict[str, Any]]:
        path = f"/api/v1/runs/{self.document['id']}/observations"
        return self.remote.pages(
            lambda cursor: self.remote.get(path, metric=metric, limit=POINTS_A_PAGE, cursor=cursor),
            "items",
            "next_cursor",
        )


def read_roles(metrics: Mapping[str, Mapping[str, Any]]) -> Roles:
    """The roles of a run's metrics; several evals are judged by the mean that the service stores."""
    minimized = frozenset(metric for metric, role in metrics.items() if role.get("direction") == "minimize")
    columns = {MetricRole(role["role"]): metric for metric, role in metrics.items()}
    if sum(role["role"] == MetricRole.EVAL for role in metrics.values()) > 1:
        columns[MetricRole.EVAL] = COMBINED_METRIC
    return Roles(columns, minimized)


_MOMENTS = ("created_at", "ended_at")


def list_runs(address: str, open_until: ExitStack) -> Iterator[ServiceRun]:
    """The runs of the project, newest first, readable until `open_until` closes; pruned runs are left out."""
    key = os.environ.get("EVALSTOP_KEY")
    if not key:
        raise UnusableArguments(f"{address} needs a key with the scope read; set EVALSTOP_KEY.")
    remote = open_until.enter_context(Remote(address, {"Authorization": f"Bearer {key}"}))
    listed = remote.pages(
        lambda cursor: remote.get("/api/v1/runs", limit=RUNS_A_PAGE, cursor=cursor), "items", "next_cursor"
    )
    return (ServiceRun(remote, item) for item in listed if item.get("pruned_at") is None)

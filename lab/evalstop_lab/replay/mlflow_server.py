"""Reads from an MLflow server's REST API: every run of every experiment, or of the one in the address.

It authenticates like MLflow's client: with `MLFLOW_TRACKING_TOKEN`, or with `MLFLOW_TRACKING_USERNAME` and
`MLFLOW_TRACKING_PASSWORD`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from evalstop_detectors import find_total_steps

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, parse_number, parse_step
from evalstop_lab.replay.mlflow_files import name_run, set_cost
from evalstop_lab.replay.remote import Remote
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

API = "/api/2.0/mlflow"
RUNS_A_PAGE = 1000
EXPERIMENTS_A_PAGE = 1000
POINTS_A_PAGE = 25_000


@dataclass(frozen=True)
class ServerRun:
    """A run from the search response."""

    remote: Remote
    run_id: str
    name: str
    info: Mapping[str, Any]
    metrics: frozenset[str]
    params: Mapping[str, str]
    tags: Mapping[str, str]

    def read(self, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Fetch the histories of the metrics with a role."""
        run = runs.run(self.name, roles)
        gpus = self.params.get("gpus") or self.tags.get("gpus") or ""
        run.total_steps = find_total_steps(self.params) or find_total_steps(self.tags) or run.total_steps
        set_cost(run, self.info.get("start_time"), self.info.get("end_time"), gpus)
        for column in roles.columns.values():
            if column not in self.metrics:
                continue
            stderr_column = f"{column}_stderr"
            stderrs = (
                dict(self._read_values(stderr_column, ReadErrors(strict=False)))
                if stderr_column in self.metrics
                else {}
            )
            for step, value in self._read_values(column, errors):
                try:
                    add_row(run, step, {column: value, stderr_column: stderrs.get(step)}, parse_number)
                except ValueError as error:
                    self._add_error(errors, error)

    def _read_values(self, metric: str, errors: ReadErrors) -> Iterator[tuple[int, object]]:
        def ask(token: str | None) -> dict[str, Any]:
            return self.remote.get(
                f"{API}/metrics/get-history",
                run_id=self.run_id,
                metric_key=metric,
                max_results=POINTS_A_PAGE,
                page_token=token,
            )

        for point in self.remote.pages(ask, "metrics", "next_page_token"):
            try:
                yield parse_step(point.get("step") or 0), point.get("value")  # protobuf omits zeros
            except ValueError as error:
                self._add_error(errors, error)

    def _add_error(self, errors: ReadErrors, error: ValueError) -> None:
        errors.add(UnreadableInput(f"{self.remote.url}, run {self.name}", str(error)))


def list_runs(address: str, open_until: ExitStack) -> Iterator[ServerRun]:
    """The runs of the server, readable until `open_until` closes; the address may end in `?experiment=NAME`."""
    parts = urlsplit(address)
    requested = parse_qs(parts.query).get("experiment")
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    auth = (user, password or "") if user else None
    remote = open_until.enter_context(Remote(parts._replace(query="").geturl(), headers, auth))

    def experiments(page: str | None) -> dict[str, Any]:
        body = {"max_results": EXPERIMENTS_A_PAGE, "page_token": page}
        return remote.post(f"{API}/experiments/search", body)

    listed = remote.pages(experiments, "experiments", "next_page_token")
    by_name = {str(item.get("name")): str(item.get("experiment_id")) for item in listed}
    if missing := sorted(set(requested or ()) - by_name.keys()):
        raise UnreadableInput(
            remote.url, f"there is no experiment {missing[0]!r}; there are {', '.join(sorted(by_name)[:30])}"
        )
    ids = [by_name[name] for name in requested or by_name]

    def search(page: str | None) -> dict[str, Any]:
        return remote.post(
            f"{API}/runs/search", {"experiment_ids": ids, "max_results": RUNS_A_PAGE, "page_token": page}
        )

    for item in remote.pages(search, "runs", "next_page_token") if ids else ():
        try:
            yield _parse_run(remote, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadableInput(remote.url, f"a run is not in MLflow's format: {error!r}") from error


def _parse_run(remote: Remote, item: Mapping[str, Any]) -> ServerRun:
    info, data = item["info"], item.get("data") or {}
    run_id = str(info.get("run_id") or info.get("run_uuid"))
    return ServerRun(
        remote,
        run_id,
        name_run(info.get("run_name"), run_id),
        {key: _parse_milliseconds(info.get(key)) for key in ("start_time", "end_time")},
        frozenset(str(metric["key"]) for metric in data.get("metrics") or ()),
        _to_dict(data.get("params")),
        _to_dict(data.get("tags")),
    )


def _to_dict(pairs: Any) -> dict[str, str]:
    return {str(pair["key"]): str(pair.get("value", "")) for pair in pairs or ()}


def _parse_milliseconds(cell: object) -> int | None:
    """Parse a time in milliseconds; some servers write 64-bit numbers as text."""
    return int(cell) if isinstance(cell, int | str) and str(cell).isdecimal() and len(str(cell)) < 20 else None

"""Reads runs from servers over HTTP: MLflow's REST API, and an EvalStop service.

MLflow: every run of every experiment, or of the one in the address, authenticated like MLflow's client, with
`MLFLOW_TRACKING_TOKEN`, or with `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`. EvalStop: the project of the
key in `EVALSTOP_KEY`; a metric has the role that its run gave it, unless an option overrides it, and several evals are
read as their mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from evalstop_detectors import MetricRole, find_total_steps
from evalstop_service.domain.run import COMBINED_METRIC

from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.rows import add_rows, parse_gpus, parse_step
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

API = "/api/2.0/mlflow"
TRIES = 4
TIMEOUT_SECONDS = 30.0


class Remote:
    """A client of the server at `url`, until `open_until` closes.

    Transient errors are retried; other errors are raised with the server's message.
    """

    def __init__(
        self, open_until: ExitStack, url: str, headers: Mapping[str, str], auth: tuple[str, str] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        verify = self.url.startswith("https:")
        client = httpx.Client(base_url=self.url, headers=headers, auth=auth, timeout=TIMEOUT_SECONDS, verify=verify)
        self._client = open_until.enter_context(client)

    def list_items(self, path: str, items: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """All items of a listing, page by page."""
        token = "page_token" if path.startswith(API) else "cursor"
        while True:
            page = self._request(path, fields)
            listed = page.get(items) or []
            if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
                raise UnreadableInput(self.url, f"`{items}` is not a list of objects; check the kind of server")
            yield from listed
            following = page.get(f"next_{token}")
            if not following:
                return
            if following == fields.get(token):
                raise UnreadableInput(self.url, f"the list of {items} does not end: a page was returned twice")
            fields[token] = following

    def _request(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                is_search = path.endswith("/search")  # MLflow's have a body
                answer = self._client.post(path, json=fields) if is_search else self._client.get(path, params=fields)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                problem = f"it answered {answer.status_code}"
                continue
            return self._read(answer, path)
        raise UnreadableInput(self.url, f"{path}: {problem}, {TRIES} times; check the address and the server")

    def _read(self, answer: httpx.Response, path: str) -> dict[str, Any]:
        if not answer.is_success:
            problem = f"{path}: it answered {answer.status_code}: {answer.text[:200].strip()!r}"
            hint = "; give a key with read access" if answer.status_code in (401, 403) else ""
            raise UnreadableInput(self.url, problem + hint)
        try:
            document = answer.json()
        except ValueError as error:
            raise UnreadableInput(self.url, f"{path}: the answer is not JSON ({error})") from error
        if not isinstance(document, dict):
            raise UnreadableInput(self.url, f"{path}: the answer is not a JSON object")
        return document


RUNS_A_PAGE = 1000
EXPERIMENTS_A_PAGE = 1000
POINTS_A_PAGE = 25_000


@dataclass(frozen=True)
class MlflowRun:
    """A run from the search response; its `tags` are also its params."""

    remote: Remote
    run_id: str
    name: str
    seconds: float | None
    metrics: frozenset[str]
    tags: Mapping[str, str]
    roles = None

    @property
    def place(self) -> str:
        return f"{self.remote.url}, run {self.name}"

    def list_metrics(self, errors: ReadErrors) -> set[str]:
        return set(self.metrics)

    def read(self, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Fetch the histories of the metrics with a role."""
        run = runs.run(self.name, roles)
        run.gpus = parse_gpus(self.tags.get("gpus"))
        run.total_steps = find_total_steps(self.tags) or run.total_steps
        run.seconds = self.seconds
        for column in (column for _, column in roles.cells if column in self.metrics):
            stderr = f"{column}_stderr"
            stderrs = dict(self._read_values(stderr, [])) if stderr in self.metrics else {}
            rows = (
                (None, step, {column: value, stderr: stderrs.get(step)})
                for step, value in self._read_values(column, errors)
            )
            add_rows(runs, roles, self.name, rows, self.place, errors)

    def _read_values(self, metric: str, errors: ReadErrors) -> Iterator[tuple[int, object]]:
        path, query = f"{API}/metrics/get-history", {"run_id": self.run_id, "metric_key": metric}
        for point in self.remote.list_items(path, "metrics", max_results=POINTS_A_PAGE, **query):
            try:
                yield parse_step(point.get("step") or 0), point.get("value")  # protobuf omits zeros
            except ValueError as error:
                errors.append(UnreadableInput(self.place, str(error)))


def list_mlflow_runs(address: str, open_until: ExitStack) -> Iterator[MlflowRun]:
    """The runs of the server, readable until `open_until` closes; the address may end in `?experiment=NAME`."""
    parts = urlsplit(address)
    requested = parse_qs(parts.query).get("experiment")
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    auth = (user, password or "") if user else None
    remote = Remote(open_until, parts._replace(query="").geturl(), headers, auth)

    listed = remote.list_items(f"{API}/experiments/search", "experiments", max_results=EXPERIMENTS_A_PAGE)
    by_name = {str(item.get("name")): str(item.get("experiment_id")) for item in listed}
    if missing := sorted(set(requested or ()) - by_name.keys()):
        raise UnreadableInput(
            remote.url, f"there is no experiment {missing[0]!r}; there are {', '.join(sorted(by_name)[:30])}"
        )
    ids = [by_name[name] for name in requested or by_name]

    found = remote.list_items(f"{API}/runs/search", "runs", experiment_ids=ids, max_results=RUNS_A_PAGE)
    for item in found if ids else ():
        try:
            yield _parse_run(remote, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadableInput(remote.url, f"a run is not in MLflow's format: {error!r}") from error


def _parse_run(remote: Remote, item: Mapping[str, Any]) -> MlflowRun:
    info, data = item["info"], item.get("data") or {}
    run_id, name = str(info.get("run_id") or info.get("run_uuid")), info.get("run_name")
    started, ended = (_parse_milliseconds(info.get(key)) for key in ("start_time", "end_time"))
    return MlflowRun(
        remote,
        run_id,
        f"{name} ({run_id[-8:]})" if name else run_id,  # EvalStop begins ids with the time
        (ended - started) / 1000 if started and ended and started <= ended else None,
        frozenset(str(metric["key"]) for metric in data.get("metrics") or ()),
        _to_dict(data.get("params")) | _to_dict(data.get("tags")),  # people correct tags; params stay
    )


def _to_dict(pairs: Any) -> dict[str, str]:
    return {str(pair["key"]): str(pair.get("value", "")) for pair in pairs or ()}


def _parse_milliseconds(cell: object) -> int | None:
    """Parse a time in milliseconds; some servers write 64-bit numbers as text."""
    return int(cell) if isinstance(cell, int | str) and str(cell).isdecimal() and len(str(cell)) < 20 else None


SERVICE_RUNS_A_PAGE, SERVICE_POINTS_A_PAGE = 200, 1000


@dataclass(frozen=True)
class ServiceRun:
    """A run as the service lists it."""

    remote: Remote
    document: Mapping[str, Any]
    name: str
    roles: Roles
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.remote.url}, run {self.name}"

    @property
    def _path(self) -> str:
        return f"/api/v1/runs/{self.document['id']}"

    def list_metrics(self, errors: ReadErrors) -> set[str]:
        """All metrics that it reported, with a role or without, as the learning rate."""
        return {item["metric"] for item in self.remote.list_items(f"{self._path}/metrics", "items")}

    def read(self, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Fetch the observations that count."""
        run = runs.run(self.name, roles)
        run.total_steps = self.document.get("total_steps")
        run.eval_changes = [int(change["step"]) for change in self.document.get("eval_changes", ())]
        started, ended = (datetime.fromisoformat(self.document[key] or self.document["updated_at"]) for key in _MOMENTS)
        run.seconds = max((ended - started).total_seconds(), 0.0)
        run.gpus = parse_gpus(self.document.get("labels", {}).get("gpus"))
        rows = (
            (None, point["step"], {column: point["value"], f"{column}_stderr": point["stderr"]})
            for column in roles.columns.values()
            for point in self.remote.list_items(
                f"{self._path}/observations", "items", metric=column, limit=SERVICE_POINTS_A_PAGE
            )
        )
        add_rows(runs, roles, self.name, rows, self.place, errors)


def read_roles(metrics: Mapping[str, Mapping[str, Any]], origins: Mapping[str, str]) -> Roles:
    """The roles of a run's metrics; several evals are judged by the mean that the service stores."""
    guesses = (metric for metric, origin in origins.items() if origin == "guessed" and metric in metrics)
    guessed = frozenset(MetricRole(metrics[metric]["role"]) for metric in guesses)
    minimized = frozenset(metric for metric, role in metrics.items() if role.get("direction") == "minimize")
    columns = {MetricRole(role["role"]): metric for metric, role in metrics.items()}
    if sum(role["role"] == MetricRole.EVAL for role in metrics.values()) > 1:
        columns[MetricRole.EVAL] = COMBINED_METRIC
    return Roles(columns, minimized, guessed=guessed)


_MOMENTS = ("created_at", "ended_at")


def list_service_runs(address: str, open_until: ExitStack) -> Iterator[ServiceRun]:
    """The runs of the project, newest first, readable until `open_until` closes; pruned runs are left out."""
    key = os.environ.get("EVALSTOP_KEY")
    if not key:
        raise UnusableArguments(f"{address} needs a key with the scope read; set EVALSTOP_KEY.")
    remote = Remote(open_until, address, {"Authorization": f"Bearer {key}"})
    for item in remote.list_items("/api/v1/runs", "items", limit=SERVICE_RUNS_A_PAGE):
        if item.get("pruned_at") is None:
            roles = read_roles(item["metrics"], (item.get("recognition") or {}).get("origins", {}))
            yield ServiceRun(remote, item, str(item["name"]), roles)

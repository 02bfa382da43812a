"""An MLflow server, through its REST API: every run of every experiment, or of the one that the address names.

It signs in as MLflow's own client does: by `MLFLOW_TRACKING_TOKEN`, or by `MLFLOW_TRACKING_USERNAME` and
`MLFLOW_TRACKING_PASSWORD`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, step_of
from evalstop_lab.replay.mlflow_files import called, set_cost
from evalstop_lab.replay.remote import Remote, environment, pages
from evalstop_lab.replay.runs import Roles, Runs, Troubles

API = "/api/2.0/mlflow"
RUNS_A_PAGE = 1000
EXPERIMENTS_A_PAGE = 1000
POINTS_A_PAGE = 25_000


@dataclass(frozen=True)
class ServerRun:
    """A run as the search answered it."""

    remote: Remote
    run_id: str
    name: str
    info: Mapping[str, Any]
    metrics: frozenset[str]
    params: Mapping[str, str]
    tags: Mapping[str, str]

    def read(self, runs: Runs, roles: Roles, troubles: Troubles) -> None:
        """Fetch the histories of the metrics that play a role."""
        run = runs.run(self.name, roles)
        gpus = self.params.get("gpus") or self.tags.get("gpus") or ""
        set_cost(run, self.info.get("start_time"), self.info.get("end_time"), gpus)
        for column in roles.columns.values():
            if column not in self.metrics:
                continue
            stderrs = dict(self._points(f"{column}_stderr")) if f"{column}_stderr" in self.metrics else {}
            for step, value in self._points(column):
                try:
                    row = {column: value, f"{column}_stderr": stderrs.get(step)}
                    add_row(run, step_of(step), row, number_of)
                except ValueError as error:
                    troubles.add(UnreadableInput(f"{self.remote.url}, run {self.name}", str(error)))

    def _points(self, metric: str) -> Iterator[tuple[int, object]]:
        def ask(token: str | None) -> dict[str, Any]:
            return self.remote.get(
                f"{API}/metrics/get-history",
                run_id=self.run_id,
                metric_key=metric,
                max_results=POINTS_A_PAGE,
                page_token=token,
            )

        for point in pages(ask, "metrics", "next_page_token"):
            yield int(point.get("step") or 0), point.get("value")  # protobuf leaves zeros out


def runs_of(address: str, open_until: ExitStack) -> Iterator[ServerRun]:
    """The runs of a server at this address, which may end in `?experiment=NAME`; they can be read until then."""
    parts = urlsplit(address)
    wanted = parse_qs(parts.query).get("experiment")
    user, password = environment("MLFLOW_TRACKING_USERNAME"), environment("MLFLOW_TRACKING_PASSWORD")
    token = environment("MLFLOW_TRACKING_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    auth = (user, password or "") if user else None
    remote = open_until.enter_context(Remote(parts._replace(query="").geturl(), headers, auth))

    def experiments(page: str | None) -> dict[str, Any]:
        body = {"max_results": EXPERIMENTS_A_PAGE, "page_token": page}
        return remote.post(f"{API}/experiments/search", body)

    found = {item["name"]: str(item["experiment_id"]) for item in pages(experiments, "experiments", "next_page_token")}
    if missing := sorted(set(wanted or ()) - found.keys()):
        raise UnreadableInput(
            remote.url, f"there is no experiment {missing[0]!r}; there are {', '.join(sorted(found)[:30])}"
        )
    ids = [found[name] for name in wanted or found]

    def search(page: str | None) -> dict[str, Any]:
        return remote.post(
            f"{API}/runs/search", {"experiment_ids": ids, "max_results": RUNS_A_PAGE, "page_token": page}
        )

    for item in pages(search, "runs", "next_page_token") if ids else ():
        info, data = item["info"], item.get("data") or {}
        run_id = str(info.get("run_id") or info.get("run_uuid"))
        yield ServerRun(
            remote,
            run_id,
            called(info.get("run_name"), run_id),
            {key: _whole(info.get(key)) for key in ("start_time", "end_time")},
            frozenset(metric["key"] for metric in data.get("metrics") or ()),
            {item["key"]: item.get("value", "") for item in data.get("params") or ()},
            {item["key"]: item.get("value", "") for item in data.get("tags") or ()},
        )


def _whole(cell: object) -> int | None:
    """A time in milliseconds: some servers write 64-bit numbers as text."""
    return int(cell) if isinstance(cell, int | str) and str(cell).isdecimal() else None

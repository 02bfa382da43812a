"""Passing on what was logged here to a real MLflow server, by a thread of its own: nobody waits for it.

    verbs ──offer──> a bounded queue ──> the run's twin there, made at its first item ──> the same request, for the twin

What does not fit into the queue is dropped and counted. A server that is away is tried again until it answers, while
the queue fills; what it refuses is dropped, and its refusal logged. Which run there is the twin of a run here is the
label `mlflow.tee_run_id`, so that any process may pass on what comes next.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx2
import sqlalchemy as sa

from evalstop_service.clock import Clock
from evalstop_service.errors import ServiceError
from evalstop_service.ingest import open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from evalstop_service.web.mlflow import labels
from evalstop_service.web.mlflow.labels import TWIN
from evalstop_service.web.mlflow.requests import milliseconds

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
MOST_WAITING_BYTES = 64 << 20
MOST_TWINS = 10_000
TIMEOUT_SECONDS = 10.0
LAST_SECONDS = 5.0
"""At the end of the process, for what still waits."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
_PASSING = (408, 429, 500, 502, 503, 504)
_TRIES_OF_500 = 4
"""MLflow answers so when its database is away, and also to a single request that it cannot store, however often."""

_OF = "evalstop.run_id"
"""The tag of a twin that names its run here."""


@dataclass(frozen=True)
class Said:
    """A request about a run, such as `runs/log-batch`, that was taken in here; without a verb, that there is a run."""

    project_id: UUID
    run_id: UUID
    verb: str | None
    body: bytes


class _Refused(Exception):
    """The other server will not take it, however often it is sent."""


class _Away(Exception):
    """The other server did not answer, or not yet."""


class _Failed(_Away):
    """The other server answered that it failed."""


class Tee:
    """Passes on to the MLflow server at `url`; `token` is its bearer token."""

    def __init__(
        self,
        url: str,
        token: str | None,
        database: Database,
        clock: Clock,
        service_metrics: ServiceMetrics,
        most_waiting: int = MOST_WAITING,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
    ) -> None:
        self._url = url.rstrip("/")
        said = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._server = httpx2.Client(
            base_url=f"{self._url}/api/2.0/mlflow/",
            headers={"Content-Type": "application/json"} | said,
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,  # the token is for this server alone
        )
        self._database, self._clock = database, clock
        self._count: Callable[[str], Any] = lambda result: service_metrics.mlflow_tee.labels(result).inc()
        self._most_waiting, self._most_waiting_bytes = most_waiting, most_waiting_bytes
        self._first_pause_seconds = first_pause_seconds
        self._changed = threading.Condition()
        self._waiting: deque[Said] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._twins: dict[tuple[UUID, UUID], str] = {}
        self._thread = threading.Thread(target=self._pass_on, name="mlflow-tee", daemon=True)
        self._thread.start()

    def offer(self, said: Said) -> None:
        """Pass this on when its turn comes; returns at once."""
        with self._changed:
            if len(self._waiting) < self._most_waiting and (
                self._waiting_bytes + len(said.body) <= self._most_waiting_bytes
            ):
                self._waiting.append(said)
                self._waiting_bytes += len(said.body)
                self._changed.notify()
                return
        self._count("dropped")

    def close(self) -> None:
        """End; what cannot be passed on within a moment is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(LAST_SECONDS)
        with self._changed:
            dropped = len(self._waiting)
            self._waiting.clear()
        for _ in range(dropped):
            self._count("dropped")

    def _pass_on(self) -> None:
        while (said := self._next()) is not None:
            try:
                self._count(self._sent(said))
            except Exception:
                _log.exception("cannot pass on to MLflow what was said of run %s", said.run_id)
                self._count("refused")
        self._server.close()

    def _next(self) -> Said | None:
        """What has waited longest; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            said = self._waiting.popleft()
            self._waiting_bytes -= len(said.body)
            return said

    def _sent(self, said: Said) -> str:
        pause_seconds, failed = self._first_pause_seconds, 0
        while True:
            try:
                twin = self._twin(said.project_id, said.run_id)
                if said.verb is not None:
                    self._call("POST", said.verb, json.loads(said.body) | {"run_id": twin, "run_uuid": twin})
            except _Refused as error:
                _log.warning("MLflow at %s refused %s of run %s: %s", self._url, said.verb, said.run_id, error)
                return "refused"
            except _Away as error:
                failed += isinstance(error, _Failed)
                if failed == _TRIES_OF_500:
                    _log.warning("MLflow at %s fails at %s of run %s: %s", self._url, said.verb, said.run_id, error)
                    return "refused"
                _log.warning("MLflow at %s is away (%s); tried again in %.1f s", self._url, error, pause_seconds)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, pause_seconds):
                        return "dropped"
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            else:
                return "sent"

    def _twin(self, project_id: UUID, run_id: UUID) -> str:
        """The id that the run has at the other server, where it is made if it is not there yet."""
        known = self._twins.get((project_id, run_id))
        if known is not None:
            return known
        try:
            with self._database.reading() as tx:
                run = runs.find_run(tx, project_id, run_id)
            if run is None:
                raise _Refused("the run is no longer on record here")
            twin = run.labels.get(TWIN)
            if twin is None:
                twin = self._made(run)
            elif not self._is_of(twin, run):
                raise _Refused(f"the label {TWIN} of the run names a run there that is not its own")
        except ServiceError as error:
            raise _Refused(str(error)) from error
        except (sa.exc.OperationalError, sa.exc.TimeoutError) as error:
            raise _Away(f"and so is the own database: {error}") from error
        if len(self._twins) >= MOST_TWINS:
            self._twins.clear()
        self._twins[project_id, run_id] = twin
        return twin

    def _made(self, run: Run) -> str:
        """A new twin of a run, or that which another process wrote down meanwhile."""
        tags = [item._asdict() for item in labels.tags_of(run.labels)]
        made = self._call(
            "POST",
            "runs/create",
            {
                "experiment_id": self._experiment(run.labels.get(labels.EXPERIMENT)),
                "user_id": run.labels.get(labels.USER, ""),
                "run_name": run.labels.get(labels.RUN_NAME, run.name),
                "start_time": milliseconds(run.created_at),
                "tags": [*tags, {"key": _OF, "value": str(run.id)}],
            },
        )
        own = {TWIN: str(made["run"]["info"]["run_id"])}
        told = open_run.relabel_run(self._database, run.project_id, run.id, lambda known: own | known, self._clock())
        return told.labels[TWIN]

    def _is_of(self, twin: str, run: Run) -> bool:
        """Whether a run there was made for this one: labels can be set by whoever may open a run, of any project."""
        found = self._call("GET", "runs/get", {"run_id": twin})
        return {"key": _OF, "value": str(run.id)} in found["run"]["data"]["tags"]

    def _experiment(self, name: str | None) -> str:
        if name is None:
            return "0"
        try:  # to make it first, as another process may be at it, too
            return str(self._call("POST", "experiments/create", {"name": name})["experiment_id"])
        except _Refused:  # it is there
            found = self._call("GET", "experiments/get-by-name", {"experiment_name": name})
            return str(found["experiment"]["experiment_id"])

    def _call(self, method: str, verb: str, said: dict[str, Any]) -> dict[str, Any]:
        try:
            if method == "GET":
                answer = self._server.get(verb, params=said)
            else:
                answer = self._server.post(verb, content=json.dumps(said))
        except httpx2.TransportError as error:
            raise _Away(f"{type(error).__name__}: {error}") from error
        told = f"{answer.status_code} {answer.text[:300]!r}"
        if answer.status_code in _PASSING:
            raise (_Failed if answer.status_code == 500 else _Away)(told)
        if answer.is_redirect:
            raise _Refused(f"{answer.status_code}, it sends elsewhere: {answer.headers.get('Location', '')!r:.300}")
        if not answer.is_success:
            raise _Refused(told)
        try:
            document: dict[str, Any] = answer.json()
        except ValueError as error:
            raise _Refused(f"it did not answer with JSON: {error}") from error
        return document

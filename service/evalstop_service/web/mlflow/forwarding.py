"""Forwarding of requests to another MLflow server, in a background thread.

    routes ──enqueue──> a bounded queue ──> the copy of the run there, created on first use ──> the same request for it

Requests that do not fit into the queue are dropped and counted. A server that does not answer is retried while the
queue fills; requests that it refuses are dropped, and the refusal is logged. The label `mlflow.tee_run_id` of a run has
the id of its copy, so that any process can forward its next request.
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
from evalstop_service.domain.decision_lifecycle import SERVICE
from evalstop_service.errors import ServiceError
from evalstop_service.ingest import open_run
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.requests import FORWARDED_RUN, Document, to_milliseconds

_log = logging.getLogger(__name__)

MAX_QUEUED = 10_000
MAX_QUEUED_BYTES = 64 << 20
MAX_KNOWN_COPIES = 10_000
TIMEOUT_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0
"""How long to keep emptying the queue when the process ends."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_MAX_TRIES_AFTER_500 = 4
"""MLflow answers 500 when its database is unavailable, but also to single requests that it cannot store."""

_ORIGINAL_RUN = "evalstop.run_id"
"""The tag of a copy with the id of its run here."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request about a run; `path` is for example `runs/log-batch`, None to create the copy only."""

    project_id: UUID
    run_id: UUID
    path: str | None
    body: bytes


class _Refused(Exception):
    """The other server refused the request for good."""


class _Unavailable(Exception):
    """The other server, or this service's database, is temporarily unavailable."""


class _ServerError(_Unavailable):
    """The other server answered 500."""


class Forwarder:
    """Forwards requests to the MLflow server at `url`; `token` is its bearer token."""

    def __init__(
        self,
        url: str,
        token: str | None,
        database: Database,
        clock: Clock,
        service_metrics: ServiceMetrics,
        max_queued: int = MAX_QUEUED,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
    ) -> None:
        self._url = url.rstrip("/")
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._server = httpx2.Client(
            base_url=f"{self._url}/api/2.0/mlflow/",
            headers={"Content-Type": "application/json"} | authorization,
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,  # else the token could reach another server
        )
        self._database, self._clock = database, clock
        self._count: Callable[[str], Any] = lambda result: service_metrics.mlflow_forwarded.labels(result).inc()
        self._max_queued, self._max_queued_bytes = max_queued, max_queued_bytes
        self._first_pause_seconds = first_pause_seconds
        self._changed = threading.Condition()
        self._queue: deque[ForwardedRequest] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._copies: dict[tuple[UUID, UUID], str] = {}
        self._thread = threading.Thread(target=self._run, name="mlflow-tee", daemon=True)
        self._thread.start()

    def enqueue(self, request: ForwardedRequest) -> None:
        """Queue a request for forwarding; returns immediately."""
        with self._changed:
            if len(self._queue) < self._max_queued and (
                self._queued_bytes + len(request.body) <= self._max_queued_bytes
            ):
                self._queue.append(request)
                self._queued_bytes += len(request.body)
                self._changed.notify()
                return
        self._count("dropped")

    def close(self) -> None:
        """Stop; requests that cannot be forwarded in time are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(SHUTDOWN_SECONDS)
        with self._changed:
            dropped = len(self._queue)
            self._queue.clear()
        for _ in range(dropped):
            self._count("dropped")

    def _run(self) -> None:
        while (request := self._take_next()) is not None:
            try:
                self._count(self._forward_request(request))
            except Exception:
                _log.exception("cannot forward a request about run %s to MLflow", request.run_id)
                self._count("refused")
        self._server.close()

    def _take_next(self) -> ForwardedRequest | None:
        """The oldest request in the queue; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            request = self._queue.popleft()
            self._queued_bytes -= len(request.body)
            return request

    def _forward_request(self, request: ForwardedRequest) -> str:
        """Send a request until it is answered: `sent`, `refused`, or `dropped` at shutdown."""
        pause_seconds, errors = self._first_pause_seconds, 0
        while True:
            try:
                copy = self._find_copy(request.project_id, request.run_id)
                if request.path is not None:
                    body = json.loads(request.body) | {"run_id": copy, "run_uuid": copy}
                    self._call_server("POST", request.path, body)
            except _Refused as error:
                _log.warning("MLflow at %s refused %s of run %s: %s", self._url, request.path, request.run_id, error)
                return "refused"
            except _Unavailable as error:
                errors += isinstance(error, _ServerError)
                if errors == _MAX_TRIES_AFTER_500:
                    _log.warning("MLflow at %s failed %s of run %s: %s", self._url, request.path, request.run_id, error)
                    return "refused"
                _log.warning("MLflow at %s is not available (%s), next try in %.1f s", self._url, error, pause_seconds)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, pause_seconds):
                        return "dropped"
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            else:
                return "sent"

    def _find_copy(self, project_id: UUID, run_id: UUID) -> str:
        """The id of the run's copy on the other server, which is created if there is none."""
        known_copy = self._copies.get((project_id, run_id))
        if known_copy is not None:
            return known_copy
        try:
            with self._database.reading() as tx:
                run = runs.load_run(tx, project_id, run_id)
            copy = run.labels.get(FORWARDED_RUN)
            if copy is None:
                copy = self._create_copy(run)
            elif not self._is_copy_of(copy, run):
                raise _Refused(f"the label {FORWARDED_RUN} names a run that is not its copy")
        except ServiceError as error:
            raise _Refused(str(error)) from error
        except (sa.exc.OperationalError, sa.exc.TimeoutError) as error:
            raise _Unavailable(f"this service's database does not answer: {error}") from error
        if len(self._copies) >= MAX_KNOWN_COPIES:
            self._copies.clear()
        self._copies[project_id, run_id] = copy
        return copy

    def _create_copy(self, run: Run) -> str:
        """A new copy of a run, or the one that another process recorded meanwhile."""
        tags = [{"key": key, "value": value} for key, value in run.labels.items()]
        created = self._call_server(
            "POST",
            "runs/create",
            {
                "experiment_id": self._find_experiment(run.labels.get(requests.EXPERIMENT)),
                "user_id": run.labels.get(requests.USER, ""),
                "run_name": run.labels.get(requests.RUN_NAME, run.name),
                "start_time": to_milliseconds(run.created_at),
                "tags": [*tags, {"key": _ORIGINAL_RUN, "value": str(run.id)}],
            },
        )
        copy_label = {FORWARDED_RUN: str(created["run"]["info"]["run_id"])}
        relabeled = open_run.relabel_run(
            self._database, run.project_id, run.id, lambda current: copy_label | current, SERVICE, self._clock()
        )
        return relabeled.labels[FORWARDED_RUN]

    def _is_copy_of(self, copy: str, run: Run) -> bool:
        """Whether a run there was created for this one. The label alone proves nothing: trainers can set it."""
        response = self._call_server("GET", "runs/get", {"run_id": copy})
        return {"key": _ORIGINAL_RUN, "value": str(run.id)} in response["run"]["data"]["tags"]

    def _find_experiment(self, name: str | None) -> str:
        if name is None:
            return "0"
        try:  # create first, because another process may do so at the same time
            return str(self._call_server("POST", "experiments/create", {"name": name})["experiment_id"])
        except _Refused:  # it exists
            response = self._call_server("GET", "experiments/get-by-name", {"experiment_name": name})
            return str(response["experiment"]["experiment_id"])

    def _call_server(self, method: str, path: str, body: Document) -> Document:
        try:
            if method == "GET":
                answer = self._server.get(path, params=body)
            else:
                answer = self._server.post(path, content=json.dumps(body))
        except httpx2.TransportError as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        summary = f"{answer.status_code} {answer.text[:300]!r}"
        if answer.status_code in _RETRIED_STATUSES:
            raise (_ServerError if answer.status_code == 500 else _Unavailable)(summary)
        if answer.is_redirect:
            raise _Refused(f"{answer.status_code}, a redirect to {answer.headers.get('Location', '')!r:.300}")
        if not answer.is_success:
            raise _Refused(summary)
        try:
            document: Document = answer.json()
        except ValueError as error:
            raise _Refused(f"the answer is not JSON: {error}") from error
        return document

"""Passing on what was logged here to a real MLflow server, by a thread of its own: nobody waits for it.

    verbs ──offer──> a bounded queue ──> the run's twin there, made at its first item ──> the same request, for the twin

What does not fit into the queue is dropped and counted. A server that is away is tried again until it answers, while
the queue fills; what it refuses is dropped, and its refusal logged. Which run there is the twin of a run here is the
label `mlflow.tee_run_id`, so that any process may pass on what comes next.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from evalstop_service import opening
from evalstop_service.clock import Clock
from evalstop_service.mlflow import labels
from evalstop_service.store import runs
from evalstop_service.store.database import Database
from evalstop_service.telemetry import Telemetry

_log = logging.getLogger(__name__)

TWIN = "mlflow.tee_run_id"

MOST_WAITING = 10_000
MOST_TWINS = 10_000
TIMEOUT_SECONDS = 10.0
LAST_SECONDS = 5.0
"""At the end of the process, for what still waits."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
_PASSING = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Said:
    """A request about a run, such as `runs/log-batch`, that was taken in here; without a verb, that there is a run."""

    project_id: UUID
    run_id: UUID
    verb: str | None
    body: dict[str, Any]


class _Refused(Exception):
    """The other server will not take it, however often it is sent."""


class _Away(Exception):
    """The other server did not answer, or not yet."""


class Tee:
    """Passes on to the MLflow server at `url`; `token` is its bearer token."""

    def __init__(
        self,
        url: str,
        token: str | None,
        database: Database,
        clock: Clock,
        telemetry: Telemetry,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._url, self._token = url.rstrip("/"), token
        self._database, self._clock = database, clock
        self._count: Callable[[str], Any] = lambda result: telemetry.mlflow_tee.labels(result).inc()
        self._queue: queue.Queue[Said] = queue.Queue(most_waiting)
        self._twins: dict[UUID, str] = {}
        self._closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="mlflow-tee", daemon=True)
        self._thread.start()

    def offer(self, said: Said) -> None:
        """Pass this on when its turn comes; returns at once."""
        try:
            self._queue.put_nowait(said)
        except queue.Full:
            self._count("dropped")

    def close(self) -> None:
        """End; what cannot be passed on within a moment is dropped."""
        self._closing.set()
        self._thread.join(LAST_SECONDS)
        self._over.set()
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
            self._count("dropped")

    def _pass_on(self) -> None:
        while not self._over.is_set():
            try:
                said = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            try:
                self._count(self._sent(said))
            except Exception:
                _log.exception("cannot pass on to MLflow what was said of run %s", said.run_id)
                self._count("refused")

    def _sent(self, said: Said) -> str:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                twin = self._twin(said)
                if said.verb is not None:
                    self._call("POST", said.verb, said.body | {"run_id": twin, "run_uuid": twin})
            except _Refused as error:
                _log.warning("MLflow at %s refused %s of run %s: %s", self._url, said.verb, said.run_id, error)
                return "refused"
            except _Away as error:
                _log.warning("MLflow at %s is away (%s); tried again in %.1f s", self._url, error, pause_seconds)
                if self._over.wait(pause_seconds) or self._closing.is_set():
                    return "dropped"
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            else:
                return "sent"

    def _twin(self, said: Said) -> str:
        """The id that the run has at the other server, where it is made if it is not there yet."""
        if said.run_id in self._twins:
            return self._twins[said.run_id]
        with self._database.reading() as tx:
            run = runs.find(tx, said.project_id, said.run_id)
        if run is None:
            raise _Refused("the run is no longer on record here")
        twin = run.labels.get(TWIN)
        if twin is None:
            tags = [item._asdict() for item in labels.tags_of(run.labels)]
            made = self._call(
                "POST",
                "runs/create",
                {
                    "experiment_id": self._experiment(run.labels.get(labels.EXPERIMENT)),
                    "user_id": run.labels.get(labels.USER, ""),
                    "run_name": run.labels.get(labels.RUN_NAME, run.name),
                    "start_time": int(run.created_at.timestamp() * 1000),
                    "tags": [*tags, {"key": "evalstop.run_id", "value": str(run.id)}],
                },
            )
            own = {TWIN: str(made["run"]["info"]["run_id"])}
            # Of two processes that made one each, the first to write it down wins.
            told = opening.relabel(self._database, run.project_id, run.id, lambda known: own | known, self._clock())
            twin = told.labels[TWIN]
        if len(self._twins) >= MOST_TWINS:
            self._twins.clear()
        self._twins[said.run_id] = twin
        return twin

    def _experiment(self, name: str | None) -> str:
        if name is None:
            return "0"
        try:
            asked = urllib.parse.urlencode({"experiment_name": name})
            found = self._call("GET", f"experiments/get-by-name?{asked}", None)
            return str(found["experiment"]["experiment_id"])
        except _Refused:  # it is not there
            return str(self._call("POST", "experiments/create", {"name": name})["experiment_id"])

    def _call(self, method: str, verb: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(  # noqa: S310 - the operator names the server, and settings admit http alone
            f"{self._url}/api/2.0/mlflow/{verb}",
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
                document: dict[str, Any] = json.loads(answer.read() or b"{}")
                return document
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise (_Away if error.code in _PASSING else _Refused)(f"{error.code} {said}") from error
        except ValueError as error:
            raise _Refused(f"it did not answer with JSON: {error}") from error
        except OSError as error:
            raise _Away(str(error)) from error

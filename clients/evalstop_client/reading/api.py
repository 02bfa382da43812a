"""`evalstop.Api()`: runs, their histories and decisions, read from the service."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self
from urllib.parse import quote
from uuid import UUID

from evalstop_client.errors import ConfigurationError, NotFound
from evalstop_client.reading.connection import Connection
from evalstop_client.reading.period import parse_since
from evalstop_client.reading.records import DecisionRecord, RunRecord
from evalstop_client.reading.table import Table
from evalstop_client.settings import validate_key, validate_url

Since = str | datetime | timedelta


class Api:
    """The project of a key: `read` suffices to read, `operate` to decide.

        api = evalstop.Api()
        for run in api.runs(verdict="stop", since="30d"):
            print(run.name, run.decision, run.best_checkpoint)
        api.run("ppo-7b").decision.veto("curriculum change")

    Arguments left out are taken from EVALSTOP_URL and EVALSTOP_KEY; raises ConfigurationError without them. Whatever
    asks the service raises ApiError where it does not get an answer.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        url = url or os.environ.get("EVALSTOP_URL")
        secret = validate_key(key or os.environ.get("EVALSTOP_KEY"))
        if not url:
            raise ConfigurationError("url: say where the service is, in url= or EVALSTOP_URL.")
        if secret is None:
            raise ConfigurationError("key: reading takes a key, in key= or EVALSTOP_KEY.")
        self.connection = Connection(validate_url(url), secret, timeout_seconds)
        """For what has no method here: `api.connection.get("/precision")` gives the answer's document."""

    def __repr__(self) -> str:
        return f"<Api {self.connection.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()

    def runs(
        self,
        *,
        name: str | None = None,
        status: str | None = None,
        verdict: str | None = None,
        policy: str | None = None,
        labels: Mapping[str, str] | None = None,
        since: Since | None = None,
    ) -> Table[RunRecord]:
        """The project's runs, the newest first. `name`: a part of it. `since`: a time, or `30d`: opened then or later.

        `policy`: NAME or NAME@VERSION.
        """
        begin = parse_since(since, datetime.now(UTC)) if since is not None else None

        def fetch() -> Iterator[RunRecord]:
            for fields in self.connection.pages("/runs", {"name": name, "status": status}):
                run = RunRecord.from_json(fields, self.connection)
                if begin is not None and run.created_at < begin:
                    return
                if (
                    verdict in (None, run.verdict.verdict)
                    and policy in (None, run.policy, run.policy.partition("@")[0])
                    and (labels or {}).items() <= run.labels.items()
                ):
                    yield run

        return Table(fetch)

    def run(self, id_or_name: str) -> RunRecord:
        """The run with this id, or of exactly this name. Raises NotFound."""
        if is_id(id_or_name):
            return RunRecord.from_json(self.connection.get(f"/runs/{quote(id_or_name, safe='')}"), self.connection)
        for run in self.runs(name=id_or_name):
            if run.name == id_or_name:
                return self.run(run.id)  # with what lists leave out
        raise NotFound(f"no run is called {id_or_name!r}.")

    def decisions(self, *, state: str | None = None, run_id: str | None = None) -> Table[DecisionRecord]:
        """The project's decisions, the newest first."""
        query = {"state": state, "run_id": run_id}

        def fetch() -> Iterator[DecisionRecord]:
            for fields in self.connection.pages("/decisions", query):
                yield DecisionRecord.from_json(fields, self.connection)

        return Table(fetch)

    def decision(self, decision_id: str) -> DecisionRecord:
        """The decision with this id. Raises NotFound."""
        fields = self.connection.get(f"/decisions/{quote(decision_id, safe='')}")
        return DecisionRecord.from_json(fields, self.connection)


def is_id(text: str) -> bool:
    """Whether a text has the form of an id, rather than of a name."""
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False

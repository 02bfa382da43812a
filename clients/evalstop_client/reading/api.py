"""`evalstop.Api()`: reads runs, their histories and decisions from the service."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

from evalstop_client.config import LabelValue, format_value
from evalstop_client.errors import ConfigurationError, NotFound
from evalstop_client.reading.connection import Connection
from evalstop_client.reading.records import DecisionRecord, RunRecord, Table
from evalstop_client.settings import validate_key, validate_url

Since = str | datetime
RunStatus = Literal["running", "parked", "completed", "failed", "stopped", "lost"]
Call = Literal["continue", "suspect", "stop"]
Mode = Literal["shadow", "enforce"]
State = Literal[
    "shadow", "held_out", "on_hold", "pending", "requested", "acknowledged", "escalated", "confirmed", "obeyed",
    "parked", "failed", "vetoed", "moot", "undone",
]  # fmt: skip


class Api:
    """The project of a key: reading requires the scope `read`, acting on decisions `operate`.

        api = evalstop.Api()
        for run in api.runs(verdict="stop", since="30d"):
            print(run.name, run.decision, run.best_checkpoint)
        api.run("ppo-7b").decision.veto("curriculum change")

    Omitted arguments are taken from EVALSTOP_URL and EVALSTOP_KEY; raises ConfigurationError without them. Every
    request raises ApiError when it fails.
    """

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        url = url or os.environ.get("EVALSTOP_URL")
        secret = validate_key(key or os.environ.get("EVALSTOP_KEY"))
        if not url:
            raise ConfigurationError("url: set EVALSTOP_URL, url= or --url to the URL of the service.")
        if secret is None:
            raise ConfigurationError("key: set a key with key= or EVALSTOP_KEY; `evalstop up` prints the first one.")
        self.connection = Connection(validate_url(url), secret)
        """For requests without a method here: `api.connection.get("/precision")` returns the document."""

    def __repr__(self) -> str:
        return f"<Api {self.connection.url}>"

    def runs(
        self,
        *,
        name: str | None = None,
        status: RunStatus | None = None,
        verdict: Call | None = None,
        policy: str | None = None,
        mode: Mode | None = None,
        owner: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        labels: Mapping[str, LabelValue] | None = None,
        since: Since | None = None,
        until: Since | None = None,
    ) -> Table[RunRecord]:
        """The project's runs that match all filters, newest first.

        `name`: part of the name. `policy`: its name. `tags`, `labels`: all must match. `since`, `until`: opened at or
        after, or before, a time, or how long ago, such as `30d`.
        """
        query = {
            "name": name,
            "status": status,
            "verdict": verdict,
            "policy": policy,
            "mode": mode,
            "owner": owner,
            "group": group,
            "tag": [tags] if isinstance(tags, str) else list(tags),
            "label": [f"{label}={format_value(value)}" for label, value in (labels or {}).items()],
            "since": parse_moment(since),
            "until": parse_moment(until),
        }
        return Table(lambda: (RunRecord(item, self.connection) for item in self.connection.pages("/runs", query)))

    def run(self, id_or_name: str) -> RunRecord:
        """The run with this id or exact name. Raises NotFound."""
        if is_id(id_or_name):
            return RunRecord(self.connection.get(f"/runs/{id_or_name}"), self.connection)
        for run in self.runs(name=id_or_name):
            if run.name == id_or_name:
                return self.run(run.id)  # with the fields that lists leave out
        raise NotFound(f"no run is called {id_or_name!r}.")

    def decisions(
        self,
        *,
        state: State | None = None,
        run_id: str | None = None,
        policy: str | None = None,
        since: Since | None = None,
        until: Since | None = None,
    ) -> Table[DecisionRecord]:
        """The project's decisions that match all filters, newest first. `run_id` may be the name of a run."""
        run_id = run_id if run_id is None or is_id(run_id) else self.run(run_id).id
        query = {
            "state": state,
            "run_id": run_id,
            "policy": policy,
            "since": parse_moment(since),
            "until": parse_moment(until),
        }

        pages = self.connection.pages
        return Table(lambda: (DecisionRecord(item, self.connection) for item in pages("/decisions", query)))

    def decision(self, id_or_run: str) -> DecisionRecord:
        """The decision with this id, or the one on the run of this name. Raises NotFound."""
        if is_id(id_or_run):
            return DecisionRecord(self.connection.get(f"/decisions/{id_or_run}"), self.connection)
        decision = self.run(id_or_run).decision
        if decision is None:
            raise NotFound(f"there is no decision on the run {id_or_run!r}.")
        return decision


def parse_moment(moment: Since | None) -> str | None:
    """The time, as the API reads it; raises ConfigurationError."""
    return parse_since(moment, datetime.now(UTC)).isoformat() if moment is not None else None


def is_id(text: str) -> bool:
    """Whether a text has the form of an id."""
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_since(since: Since, now: datetime) -> datetime:
    """The time that `since` means; raises ConfigurationError. A time without a time zone is UTC.

    >>> parse_since("30d", datetime(2026, 1, 31, tzinfo=UTC)).isoformat()
    '2026-01-01T00:00:00+00:00'
    """
    try:
        if isinstance(since, str):
            if past := re.fullmatch(r"([0-9]{1,6})([mhdw])", since.strip()):
                return now - timedelta(**{UNITS[past[2]]: int(past[1])})
            since = datetime.fromisoformat(since.strip())
        return since if since.tzinfo is not None else since.replace(tzinfo=UTC)
    except (ValueError, OverflowError, TypeError, AttributeError):
        raise ConfigurationError(
            f"since {since!r}: write a time such as 2026-01-31, or a period: 45m, 12h, 30d."
        ) from None

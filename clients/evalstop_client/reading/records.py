"""Typed responses of the service, and lists of them; `document` holds a whole response, with fields of no attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from html import escape
from importlib import import_module
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar

from evalstop_client.errors import AnswerMalformed, LibraryMissing
from evalstop_client.latest_answer import Verdict, describe_run, find_eval
from evalstop_client.reading.connection import Connection
from evalstop_client.service import Json

Cell = str | int | float | bool | object | None


class Row(Protocol):
    """A record that can become a row of a data frame."""

    def to_row(self) -> dict[str, Cell]:
        """Values by column name."""


Item = TypeVar("Item", bound=Row)

SHOWN_ROWS = 20
"""The most rows that a notebook shows of a table."""


class Table(Generic[Item]):
    """Records of the service.

    Each iteration fetches them again, page by page:

        for run in api.runs(verdict="stop"):
            print(run.name, run.decision)
        frame = api.runs(since="30d").to_pandas()
    """

    def __init__(self, fetch: Callable[[], Iterable[Item]]) -> None:
        self._fetch = fetch

    def __repr__(self) -> str:
        return "<Table: read it by `for`, or by to_rows(), to_pandas() or to_polars()>"

    def _repr_html_(self) -> str:
        """The first records as a table, for notebooks."""
        return _format_html([item.to_row() for item in islice(self, SHOWN_ROWS)])

    def __iter__(self) -> Iterator[Item]:
        return iter(self._fetch())

    def to_rows(self) -> list[dict[str, Cell]]:
        """All records as rows of plain values."""
        return [item.to_row() for item in self]

    def to_pandas(self) -> Any:
        """All records as a pandas.DataFrame. Raises LibraryMissing."""
        return _import_library("pandas").DataFrame(self.to_rows())

    def to_polars(self) -> Any:
        """All records as a polars.DataFrame. Raises LibraryMissing."""
        return _import_library("polars").DataFrame(self.to_rows())


def _format_html(rows: Sequence[Mapping[str, Cell]]) -> str:
    """A table of HTML with a column for each name; texts of trainers are escaped."""
    names = list(rows[0]) if rows else ["none"]
    lines = [[f"<td>{_format_cell(row[name])}</td>" for name in names] for row in rows]
    lines.insert(0, [f"<th>{escape(name)}</th>" for name in names])
    return f"<table>{''.join('<tr>' + ''.join(line) + '</tr>' for line in lines)}</table>"


def _format_cell(value: Cell) -> str:
    text = escape("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
    return f'<a href="{text}">{text}</a>' if text.startswith(("http://", "https://")) else text


def _format_record(record: Row) -> str:
    return _format_html([{"field": name, "value": value} for name, value in record.to_row().items()])


def _import_library(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise LibraryMissing(f"`pip install {library}`, or read the records by `for` or `to_rows()`.") from error


Outcome = Literal["right", "wrong", "unknown"]

LAST_ATTEMPT = 999_999_999
"""In a cursor after a step: everything observed at that step was read."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint to ship; `score` is the eval as measured at its step."""

    step: int
    uri: str
    score: float


@dataclass(frozen=True)
class ObservationRecord:
    """A value of a metric. `superseded_by`: the attempt that superseded it; None while it counts."""

    metric: str
    step: int
    value: float
    stderr: float | None
    time: datetime | None
    attempt: int
    superseded_by: int | None

    @classmethod
    def from_json(cls, document: Json) -> ObservationRecord:
        return _read_record(cls, document)

    def to_row(self) -> dict[str, Cell]:
        return dict(vars(self))


@dataclass(frozen=True)
class DecisionRecord:
    """A decision to stop a run, as of when it was read. Methods that change it return a new record and raise ApiError.

    `reason`: why it is in its state; `verdict`: why the policy wanted the stop. `outcome`: right, wrong or unknown;
    None until a person labels it or later evals show it.
    """

    id: str
    state: str
    reason: str
    guards: tuple[str, ...]
    run_id: str
    run_name: str
    attempt: int
    step: int
    policy: str
    verdict: Verdict
    outcome: str | None
    created_at: datetime
    document: Json = field(repr=False, compare=False)
    _connection: Connection = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, document: Json, connection: Connection) -> DecisionRecord:
        return _read_record(
            cls,
            document,
            reason=lambda: document["state_reason"],
            guards=lambda: tuple(document["guard_kinds"]),
            policy=lambda: _name_policy(document["policy"]),
            outcome=lambda: document["outcome"]["outcome"] if document["outcome"] else None,
            document=lambda: document,
            _connection=lambda: connection,
        )

    def __str__(self) -> str:
        return self.state

    def _repr_html_(self) -> str:
        return _format_record(self)

    def veto(self, reason: str) -> DecisionRecord:
        """Cancel a stop that is on hold or pending."""
        return self._act("veto", reason)

    def release(self, reason: str) -> DecisionRecord:
        """Carry out a stop that is on hold, despite its guards."""
        return self._act("release", reason)

    def undo(self, reason: str) -> DecisionRecord:
        """Undo a requested stop, or resume a parked job: receivers are asked to resume it if they can."""
        return self._act("undo", reason)

    def label(self, outcome: Outcome, note: str = "", *, turn_step: int | None = None) -> DecisionRecord:
        """Label whether it was right, and the step where the eval turned."""
        body = {"outcome": outcome, "note": note, "turn_step": turn_step}
        return DecisionRecord.from_json(self._connection.post(f"/decisions/{self.id}/outcome", body), self._connection)

    def to_row(self) -> dict[str, Cell]:
        fields = ("id", "state", "reason", "run_id", "run_name", "attempt", "step", "policy", "outcome", "created_at")
        return {name: getattr(self, name) for name in fields} | {
            "guards": ", ".join(self.guards),
            "verdict_reason": self.verdict.reason,
        }

    def _act(self, action: str, reason: str) -> DecisionRecord:
        document = self._connection.post(f"/decisions/{self.id}/{action}", {"reason": reason})
        return DecisionRecord.from_json(document, self._connection)


@dataclass(frozen=True, repr=False)
class RunRecord:
    """A run, as of when it was read. `metrics`: their roles; `decision`: the one on its current attempt."""

    id: str
    name: str
    url: str
    status: str
    attempt: int
    mode: str
    policy: str
    metrics: Mapping[str, Mapping[str, str]]
    labels: Mapping[str, str]
    params: Mapping[str, str]
    owner: str | None
    group: str | None
    tags: tuple[str, ...]
    notes: str
    total_steps: int | None
    last_step: int | None
    verdict: Verdict
    should_stop: bool
    best_checkpoint: Checkpoint | None
    decision: DecisionRecord | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    document: Json = field(repr=False, compare=False)
    _connection: Connection = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, document: Json, connection: Connection) -> RunRecord:
        best, decision = document.get("best_checkpoint"), document.get("decision")
        return _read_record(
            cls,
            document,
            url=lambda: document["url"] or connection.page_of(document["id"]),
            policy=lambda: _name_policy(document["policy"]),
            best_checkpoint=lambda: Checkpoint(best["step"], best["uri"], float(best["score"])) if best else None,
            decision=lambda: DecisionRecord.from_json(decision, connection) if decision else None,
            document=lambda: document,
            _connection=lambda: connection,
        )

    @property
    def eval_metric(self) -> str | None:
        """The metric with the role eval, `evalstop/score` if there are several; None if there is none."""
        return find_eval(self.metrics)

    def history(
        self, metric: str | None = None, *, after_step: int | None = None, superseded: bool = False
    ) -> Table[ObservationRecord]:
        """The observations of a metric by step, by default those of the eval.

        `superseded`: include those of earlier attempts that a resume superseded.
        """
        name = metric or self.eval_metric
        path = f"/runs/{self.id}/observations"

        def fetch() -> Iterator[ObservationRecord]:
            cursor = f"{after_step}.{LAST_ATTEMPT}" if after_step is not None else None
            items = self._connection.pages(path, {"metric": name, "cursor": cursor}, page=1000) if name else ()
            records = map(ObservationRecord.from_json, items)
            return (record for record in records if superseded or record.superseded_by is None)

        return Table(fetch)

    def refresh(self) -> RunRecord:
        """The run as it is now."""
        return RunRecord.from_json(self._connection.get(f"/runs/{self.id}"), self._connection)

    def stop(self, reason: str) -> RunRecord:
        """Stop the run now, regardless of policy and mode."""
        return RunRecord.from_json(self._connection.post(f"/runs/{self.id}/stop", {"reason": reason}), self._connection)

    def to_row(self) -> dict[str, Cell]:
        described = ("id", "name", "owner", "group", "status", "attempt", "mode", "policy")
        fields = (*described, "total_steps", "last_step", "should_stop")
        best = self.best_checkpoint
        return {name: getattr(self, name) for name in fields} | {
            "verdict": self.verdict.verdict,
            "reason": self.verdict.reason,
            "decision": self.decision.state if self.decision else None,
            "best_step": best.step if best else None,
            "best_score": best.score if best else None,
            "best_uri": best.uri if best else None,
            "created_at": self.created_at,
            "ended_at": self.ended_at,
            "url": self.url,
        }

    def _repr_html_(self) -> str:
        return _format_record(self)

    def __repr__(self) -> str:
        shown = (self.name, self.mode, self.policy, self.verdict, self.decision, self.url)
        return f"<RunRecord {describe_run(*shown)}>"


Record = TypeVar("Record", ObservationRecord, DecisionRecord, RunRecord)

PARSERS: Mapping[str, Callable[[Any], object]] = {
    "float": float,
    "datetime": datetime.fromisoformat,
    "datetime | None": lambda text: text and datetime.fromisoformat(text),
    "tuple[str, ...]": tuple,
    "Verdict": Verdict.from_json,
}
"""How the fields of these types are read; others are as they come."""


def _read_record(cls: type[Record], source: Json, /, **own: Callable[[], object]) -> Record:
    """A record with the fields of an answer, some of them read in a way of their `own`. Raises AnswerMalformed."""
    try:
        values: dict[str, Any] = {name: read() for name, read in own.items()}
        for item in fields(cls):
            if item.name not in own:
                value = source[item.name]
                parse = PARSERS.get(str(item.type))
                values[item.name] = parse(value) if parse else value
        return cls(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AnswerMalformed(f"{type(error).__name__}: {error}") from error


def _name_policy(policy: Json) -> str:
    return f"{policy['name']}@{policy['version']}"

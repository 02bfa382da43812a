"""Runs and decisions as the API answers them, and lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, TypeVar

from evalstop_client.latest_answer import Verdict, describe_run
from evalstop_client.reading.connection import Connection
from evalstop_client.service import Json


def pick_columns(document: Json, columns: str) -> dict[str, Any]:
    """Values of an answer by name; `columns` has words such as `status`, or `reason=verdict.reason` for a path.

    Where a part of the path is missing or null, the value is None. A policy is its name and version.

    >>> pick_columns({"step": 7, "policy": {"name": "paper", "version": 1}}, "step policy why=verdict.reason")
    {'step': 7, 'policy': 'paper@1', 'why': None}
    """
    named = [column.partition("=") for column in columns.split()]
    return {name: _find_value(document, path or name) for name, _, path in named}


def _find_value(document: Json, path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    is_policy = isinstance(value, Mapping) and value.keys() == {"name", "version"}
    return f"{value['name']}@{value['version']}" if is_policy else value


class Record:
    """An answer of the API, as of when it was read: its fields are attributes, and `document` holds it whole."""

    columns: ClassVar[str]
    """Those of `to_row`, as `pick_columns` reads them."""

    def __init__(self, document: Json, connection: Connection) -> None:
        self.document = document
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["document"][name]
        except KeyError:
            raise AttributeError(f"the answer has no field {name!r}") from None

    def to_row(self) -> dict[str, Any]:
        """The most important values by name, for a data frame."""
        return pick_columns(self.document, self.columns)

    def _repr_html_(self) -> str:
        return _format_html([{"field": name, "value": value} for name, value in self.to_row().items()])


Item = TypeVar("Item", bound=Record)

SHOWN_ROWS = 20
"""The most rows that a notebook shows of a table."""


class Table(Generic[Item]):
    """Records of the service.

    Each iteration fetches them again, page by page:

        for run in api.runs(verdict="stop"):
            print(run.name, run.decision)
        frame = pandas.DataFrame(api.runs(since="30d").to_rows())
    """

    def __init__(self, fetch: Callable[[], Iterable[Item]]) -> None:
        self._fetch = fetch

    def __repr__(self) -> str:
        return "<Table: read it by `for`, or by to_rows()>"

    def _repr_html_(self) -> str:
        """The first records as a table, for notebooks."""
        return _format_html([item.to_row() for item in islice(self, SHOWN_ROWS)])

    def __iter__(self) -> Iterator[Item]:
        return iter(self._fetch())

    def to_rows(self) -> list[dict[str, Any]]:
        """All records as rows of plain values, which pandas and polars read."""
        return [item.to_row() for item in self]


def _format_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of HTML with a column for each name; texts of trainers are escaped."""
    names = list(rows[0]) if rows else ["none"]
    lines = [[f"<td>{_format_cell(row[name])}</td>" for name in names] for row in rows]
    lines.insert(0, [f"<th>{escape(name)}</th>" for name in names])
    return f"<table>{''.join('<tr>' + ''.join(line) + '</tr>' for line in lines)}</table>"


def _format_cell(value: object) -> str:
    text = escape("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
    return f'<a href="{text}">{text}</a>' if text.startswith(("http://", "https://")) else text


Outcome = Literal["right", "wrong", "unknown"]


class ObservationRecord(Record):
    """A value of a metric, with the fields of `columns`."""

    columns = "metric step value stderr time attempt"

    def __init__(self, document: Json, connection: Connection) -> None:
        super().__init__(document | {"value": float(document["value"])}, connection)  # "NaN" in JSON


class DecisionRecord(Record):
    """A decision to stop a run, with the fields of `GET /api/v1/decisions/{id}`. Methods that change it return a new
    record and raise ApiError.

    `state_reason`: why it is in its state; `guard_kinds`: what holds it; `verdict`: why the policy wanted the stop;
    `outcome`: whether it was right, once a person labels it or later evals show it.
    """

    columns = (
        "id state state_reason run_id run_name attempt step policy outcome=outcome.outcome "
        "verdict_reason=verdict.reason created_at"
    )

    def __str__(self) -> str:
        return str(self.state)

    def veto(self, reason: str) -> DecisionRecord:
        """Cancel a stop that is on hold or pending."""
        return self._post("veto", {"reason": reason})

    def release(self, reason: str) -> DecisionRecord:
        """Carry out a stop that is on hold, despite its guards."""
        return self._post("release", {"reason": reason})

    def undo(self, reason: str) -> DecisionRecord:
        """Undo a requested stop, or resume a parked job: receivers are asked to resume it if they can."""
        return self._post("undo", {"reason": reason})

    def label(self, outcome: Outcome, note: str = "", *, turn_step: int | None = None) -> DecisionRecord:
        """Label whether it was right, and the step where the eval turned."""
        return self._post("outcome", {"outcome": outcome, "note": note, "turn_step": turn_step})

    def _post(self, action: str, body: Json) -> DecisionRecord:
        return DecisionRecord(self._connection.post(f"/decisions/{self.id}/{action}", body), self._connection)


class RunRecord(Record):
    """A run, with the fields of `GET /api/v1/runs/{id}`. `metrics`: their roles; `decision`: the one on its current
    attempt; `best_checkpoint`: the one to ship, with its `step`, `uri` and `score`."""

    columns = (
        "id name owner group status attempt mode policy total_steps last_step should_stop verdict=verdict.verdict "
        "reason=verdict.reason decision=decision.state best_step=best_checkpoint.step best_score=best_checkpoint.score "
        "best_uri=best_checkpoint.uri created_at ended_at url"
    )

    def __init__(self, document: Json, connection: Connection) -> None:
        super().__init__(document | {"url": document["url"] or connection.page_of(document["id"])}, connection)

    @property
    def verdict(self) -> Verdict:
        """What its policy calls for."""
        return Verdict.from_json(self.document["verdict"])

    @property
    def decision(self) -> DecisionRecord | None:
        """The decision to stop its current attempt; None without one."""
        decision = self.document.get("decision")
        return DecisionRecord(decision, self._connection) if decision else None

    @property
    def eval_metric(self) -> str | None:
        """The metric with the role eval, `evalstop/score` if there are several; None if there is none."""
        evals = [name for name, role in self.metrics.items() if role.get("role") == "eval"]
        return "evalstop/score" if len(evals) > 1 else next(iter(evals), None)

    def history(self, metric: str | None = None) -> Table[ObservationRecord]:
        """The observations of a metric by step, by default those of the eval, without those that a resume
        superseded."""
        name = metric or self.eval_metric
        path = f"/runs/{self.id}/observations"

        def fetch() -> Iterator[ObservationRecord]:
            items = self._connection.pages(path, {"metric": name}, page=1000) if name else ()
            return (ObservationRecord(item, self._connection) for item in items)

        return Table(fetch)

    def stop(self, reason: str) -> RunRecord:
        """Stop the run now, regardless of policy and mode."""
        return RunRecord(self._connection.post(f"/runs/{self.id}/stop", {"reason": reason}), self._connection)

    def __repr__(self) -> str:
        return f"<RunRecord {describe_run(self.document, self.verdict, self.decision)}>"

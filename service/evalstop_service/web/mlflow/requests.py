"""What MLflow's requests hold: read as its own server reads them, whatever else a newer client may send along."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from evalstop_service.store.observations import Point
from evalstop_service.web.api.schemas import MAX_STEP, written
from evalstop_service.web.mlflow.labels import Item

MOST_METRICS, MOST_PARAMS, MOST_TAGS, MOST_TOGETHER = 1000, 100, 100, 1000
"""In one batch: MLflow's own limits."""

_NAME = re.compile(r"[/\w.\- :@]+")
_PLACE_OUTSIDE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")
_LAST_MILLISECOND = 253_402_300_799_999  # of the year 9999
_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def _number(value: Any) -> float:
    """A double as protobuf writes it in JSON: a number, or a text that is one, NaN and the infinities included."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number, or one of NaN, Infinity, -Infinity as text")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError("a number that a double can hold, or one of NaN, Infinity, -Infinity as text") from error


def _whole(value: Any) -> Any:
    """An int64 as protobuf writes it in JSON: a number or a text."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value) else value


def _named(name: str) -> str:
    if not _NAME.fullmatch(name) or _PLACE_OUTSIDE.search(name):
        raise ValueError("a name of letters, digits and _ - . : @ / or blanks, and no path out of its place")
    return name


Whole = Annotated[int, BeforeValidator(_whole)]
Key = Annotated[str, Field(min_length=1, max_length=250)]
Text = Annotated[str, Field(max_length=100_000)]
Filter = Annotated[str, Field(max_length=10_000)]


class Word(BaseModel):
    """A request, or a part of one; what is not known here is passed over, as MLflow does."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)


class MetricIn(Word):
    """One value of one metric."""

    key: Annotated[Key, AfterValidator(_named)]
    value: Annotated[float, BeforeValidator(_number), PlainSerializer(written)]
    timestamp: Whole | None = None
    step: Whole | None = None

    def point(self) -> Point | None:
        """The observation; None when its step is negative or past what JSON keeps exact, which has no place here."""
        step = self.step or 0
        if not 0 <= step <= MAX_STEP:
            return None
        milliseconds = self.timestamp or 0
        told = 0 < milliseconds <= _LAST_MILLISECOND
        return Point(self.key, step, self.value, None, moment(milliseconds) if told else None)


class ItemIn(Word):
    """A param or a tag."""

    key: Key
    value: Text = ""

    def item(self) -> Item:
        """The pair."""
        return Item(self.key, self.value)


class RunWord(Word):
    """What is said of a run."""

    run_id: str | None = None
    run_uuid: str | None = None


class LogMetric(MetricIn, RunWord):
    """runs/log-metric."""


class LogItem(ItemIn, RunWord):
    """runs/log-parameter and runs/set-tag."""


class DeleteTag(RunWord):
    """runs/delete-tag."""

    key: Key


class LogBatch(RunWord):
    """runs/log-batch."""

    metrics: Annotated[list[MetricIn], Field(max_length=MOST_METRICS)] = []
    params: Annotated[list[ItemIn], Field(max_length=MOST_PARAMS)] = []
    tags: Annotated[list[ItemIn], Field(max_length=MOST_TAGS)] = []


class CreateRun(Word):
    """runs/create."""

    experiment_id: str = "0"
    user_id: Text | None = None
    run_name: Text | None = None
    start_time: Whole | None = None
    tags: Annotated[list[ItemIn], Field(max_length=MOST_TOGETHER)] = []  # MLflow's own takes any number here


class UpdateRun(RunWord):
    """runs/update."""

    status: str | None = None
    end_time: Whole | None = None
    run_name: Text | None = None


class SearchRuns(Word):
    """runs/search."""

    experiment_ids: Annotated[list[str], Field(max_length=1000)] = []
    filter: Filter = ""
    run_view_type: str = "ACTIVE_ONLY"
    max_results: Annotated[Whole, Field(ge=1, le=50_000)] = 1000
    order_by: list[str] = []
    page_token: str | None = None


class CreateExperiment(Word):
    """experiments/create."""

    name: Annotated[str, Field(min_length=1, max_length=500)]


class SearchExperiments(Word):
    """experiments/search."""

    filter: Filter = ""
    max_results: Annotated[Whole, Field(ge=1, le=50_000)] = 1000
    order_by: list[str] = []
    page_token: str | None = None
    view_type: str = "ACTIVE_ONLY"


def moment(milliseconds: int) -> datetime:
    """A moment as MLflow counts time."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds(moment: datetime) -> int:
    """A moment as MLflow counts time."""
    return int(moment.timestamp() * 1000)


def is_id(text: str) -> bool:
    """Whether a text can be an id that was given here."""
    return _UUID.fullmatch(text) is not None

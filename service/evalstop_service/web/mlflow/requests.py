"""MLflow's request bodies, parsed as its own server parses them; fields of newer clients are ignored."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer

from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.schemas import MAX_STEP, encode_number
from evalstop_service.web.mlflow.labels import Item

LONGEST_URI = 2000
MAX_INPUTS, MAX_OUTPUTS = 1000, 100
MAX_METRICS, MAX_PARAMS, MAX_TAGS, MAX_BATCH_ITEMS = 1000, 100, 100, 1000
"""MLflow's own limits for a batch."""
MOST_NESTED = 32
"""Levels of a forwarded document."""

Document = dict[str, Any]
"""A JSON document of MLflow's API."""

_NAME = re.compile(r"[/\w.\- :@]+")
_PATH_TRAVERSAL = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")
_LAST_MILLISECOND = 253_402_300_799_999  # of the year 9999
_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def _parse_number(value: Any) -> float:
    """A double in protobuf's JSON format: a number, or a string with a number, NaN or an infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a number, or one of NaN, Infinity, -Infinity as text")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError("a number that a double can hold, or one of NaN, Infinity, -Infinity as text") from error


def _parse_int64(value: Any) -> Any:
    """An int64 in protobuf's JSON format: a number or a string."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value) else value


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or _PATH_TRAVERSAL.search(name):
        raise ValueError("a name has letters, digits, blanks and _ - . : @ / only, and is not a relative path")
    return name


def _check_nesting(value: Any, most: int = MOST_NESTED) -> Any:
    if isinstance(value, (dict, list)):
        if most == 0:
            raise ValueError(f"nested in more than {MOST_NESTED} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check_nesting(item, most - 1)
    return value


Whole = Annotated[int, BeforeValidator(_parse_int64)]
Key = Annotated[str, Field(min_length=1, max_length=250)]
Text = Annotated[str, Field(max_length=100_000)]
Filter = Annotated[str, Field(max_length=10_000)]
Forwarded = Annotated[Document, AfterValidator(lambda document: _check_nesting(document))]
"""A document that is forwarded unchanged."""


class MlflowBody(BaseModel):
    """A request, or a part of one. Unknown fields are ignored, as in MLflow."""


class MetricIn(MlflowBody):
    """One value of one metric."""

    key: Annotated[Key, AfterValidator(_check_name)]
    value: Annotated[float, BeforeValidator(_parse_number), PlainSerializer(encode_number)]
    timestamp: Whole
    step: Whole | None = None
    model_id: Annotated[str, Field(max_length=100)] | None = None
    dataset_name: Annotated[str, Field(max_length=500)] | None = None
    dataset_digest: Annotated[str, Field(max_length=500)] | None = None

    def to_observation(self) -> PostedObservation | None:
        """The observation; None if its step is negative or too large for JSON numbers."""
        step = self.step or 0
        if not 0 <= step <= MAX_STEP:
            return None
        time = parse_milliseconds(self.timestamp) if 0 < self.timestamp <= _LAST_MILLISECOND else None
        return PostedObservation(self.key, step, self.value, None, time)


class ItemIn(MlflowBody):
    """A param or a tag."""

    key: Key
    value: Text = ""

    def to_item(self) -> Item:
        """The key and the value."""
        return Item(self.key, self.value)


class RunBody(MlflowBody):
    """A request about a run."""

    run_id: str | None = None
    run_uuid: str | None = None


class LogMetric(MetricIn, RunBody):
    """runs/log-metric."""


class LogItem(ItemIn, RunBody):
    """runs/log-parameter and runs/set-tag."""


class DeleteTag(RunBody):
    """runs/delete-tag."""

    key: Key


class LogBatch(RunBody):
    """runs/log-batch."""

    metrics: Annotated[list[MetricIn], Field(max_length=MAX_METRICS)] = []
    params: Annotated[list[ItemIn], Field(max_length=MAX_PARAMS)] = []
    tags: Annotated[list[ItemIn], Field(max_length=MAX_TAGS)] = []


class CreateRun(MlflowBody):
    """runs/create."""

    experiment_id: str = "0"
    user_id: Text | None = None
    run_name: Text | None = None
    start_time: Whole | None = None
    tags: Annotated[list[ItemIn], Field(max_length=MAX_BATCH_ITEMS)] = []  # MLflow has no limit here


class UpdateRun(RunBody):
    """runs/update."""

    status: str | None = None
    end_time: Whole | None = None
    run_name: Text | None = None


class LogInputs(RunBody):
    """runs/log-inputs: forwarded, and not kept."""

    datasets: Annotated[list[Forwarded], Field(max_length=MAX_INPUTS)] = []


class Output(MlflowBody):
    """A logged model that a run created."""

    model_id: Annotated[str, Field(max_length=200)] = ""
    step: Whole | None = None


class LogOutputs(RunBody):
    """runs/outputs."""

    models: Annotated[list[Output], Field(max_length=MAX_OUTPUTS)] = []


class LogModel(RunBody):
    """runs/log-model of clients before MLflow 3; `model_json` is a document with the model's `artifact_path`."""

    model_json: Text = ""


class Page(MlflowBody):
    """Fields common to searches."""

    max_results: Annotated[Whole, Field(ge=1, le=50_000)] = 1000
    order_by: Annotated[list[Filter], Field(max_length=100)] = []
    page_token: Annotated[str | None, Field(pattern=r"^[0-9]{1,9}$")] = None

    @property
    def offset(self) -> int:
        """The number of items on previous pages."""
        return int(self.page_token or 0)


class SearchRuns(Page):
    """runs/search."""

    experiment_ids: Annotated[list[str], Field(max_length=1000)] = []
    filter: Filter = ""
    run_view_type: str = "ACTIVE_ONLY"


class CreateExperiment(MlflowBody):
    """experiments/create."""

    name: Annotated[str, Field(min_length=1, max_length=500)]
    artifact_location: Annotated[str, Field(max_length=LONGEST_URI)] = ""
    tags: Annotated[list[ItemIn], Field(max_length=MAX_TAGS)] = []


class ExperimentBody(MlflowBody):
    """experiments/delete and experiments/restore."""

    experiment_id: str


class RenameExperiment(ExperimentBody):
    """experiments/update."""

    new_name: Annotated[str, Field(min_length=1, max_length=500)]


class ExperimentTag(ExperimentBody, ItemIn):
    """experiments/set-experiment-tag."""


class DeleteExperimentTag(ExperimentBody):
    """experiments/delete-experiment-tag."""

    key: Key


class SearchExperiments(Page):
    """experiments/search."""

    filter: Filter = ""
    view_type: str = "ACTIVE_ONLY"


class CreateModel(MlflowBody):
    """Creation of a logged model."""

    experiment_id: str = "0"
    name: Annotated[str, Field(max_length=500)] = ""
    source_run_id: Annotated[str, Field(max_length=100)] = ""


class FinalizeModel(MlflowBody):
    """Whether a logged model was saved completely."""

    status: Annotated[str, Field(max_length=100)] = ""


def parse_milliseconds(milliseconds: int) -> datetime:
    """A time from milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def to_milliseconds(time: datetime) -> int:
    """A time in milliseconds since 1970."""
    return round(time.timestamp() * 1000)


def is_uuid(text: str) -> bool:
    """Whether a text is an id as this service creates them."""
    return _UUID.fullmatch(text) is not None

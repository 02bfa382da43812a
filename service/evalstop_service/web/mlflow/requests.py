"""MLflow's request bodies, parsed as its own server parses them, and its tags and params. Pure.

Fields of newer clients are ignored. A tag is stored as the label of its name, so that `gpus`, `slurm_job_id` or
`evalstop.preset` can be set as tags; a param is stored separately, so that hundreds of them leave room for labels. Tags
that start with `evalstop.` (except `evalstop.preset` and `evalstop.obeyed`) and those of the service are ignored.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer

from evalstop_service.domain.run import MOST_LABEL_BYTES, count_bytes
from evalstop_service.domain.run import MOST_LABELS as MOST_LABELS
from evalstop_service.store.mlflow import RUN_NAME as RUN_NAME
from evalstop_service.store.mlflow import USER as USER
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.schemas import MAX_STEP, encode_number

EXPERIMENT = "mlflow.experiment"
FORWARDED_RUN = "mlflow.tee_run_id"
"""The id of the run's copy on the MLflow server that requests are forwarded to."""
PRESET = "evalstop.preset"
OBEYED = "evalstop.obeyed"
"""The decision because of which the trainer ends the run."""
OWN = "evalstop."
CHECKPOINT = "evalstop.checkpoint."
"""A tag `evalstop.checkpoint.STEP` has the URI of the checkpoint of that step."""

MOST_PARAMS = 2000
MOST_PARAM_BYTES = 256 * 1024
LONGEST_NAME, LONGEST_VALUE = 256, 2000


class Item(NamedTuple):
    """A param or a tag."""

    key: str
    value: str


class MergedLabels(NamedTuple):
    """The labels or params, and how many items did not fit."""

    labels: dict[str, str]
    dropped: int


def merge_tags(labels: Mapping[str, str], tags: Iterable[Item]) -> MergedLabels:
    """The labels of a run with these tags added. A tag takes its last value."""
    return merge_items(labels, (item for item in tags if is_client_tag(clean_text(item.key))))


def merge_params(params: Mapping[str, str], new: Iterable[Item]) -> MergedLabels:
    """The params of a run with these added. A param keeps its first value."""
    unknown = (item for item in new if clean_text(item.key) not in params)
    return merge_items(params, unknown, MOST_PARAMS, MOST_PARAM_BYTES)


def merge_items(
    current: Mapping[str, str], new: Iterable[Item], most: int = MOST_LABELS, most_bytes: int = MOST_LABEL_BYTES
) -> MergedLabels:
    """Add items, up to limits on their number, the length of each and the total size."""
    merged, dropped, size = dict(current), 0, count_bytes(current)
    for key, value in new:
        name, text = clean_text(key), clean_text(value)[:LONGEST_VALUE]
        before = count_bytes({name: merged[name]}) if name in merged else 0
        after = size - before + count_bytes({name: text})
        fits = name in merged or len(merged) < most
        if name and len(name) <= LONGEST_NAME and fits and (after <= most_bytes or after <= size):
            merged[name], size = text, after
        else:
            dropped += 1
    return MergedLabels(merged, dropped)


def is_client_tag(name: str) -> bool:
    """Whether clients may set and delete the tag of this name."""
    return name in (PRESET, OBEYED) or not (name in ("", EXPERIMENT, FORWARDED_RUN) or name.startswith(OWN))


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )


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
            if isinstance(item, (dict, list)):  # not a call for each of a million numbers
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

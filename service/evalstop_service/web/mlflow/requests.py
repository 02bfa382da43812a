"""MLflow's request bodies, parsed as its own server parses them, and its tags and params. Pure.

Fields of newer clients are ignored. A tag is stored as the label of its name, so that `gpus`, `slurm_job_id` or
`evalstop.preset` can be set as tags; a param is stored separately, so that hundreds of them leave room for labels. Tags
that start with `evalstop.` (except `evalstop.preset`, `evalstop.eval` and `evalstop.obeyed`) and those of the service
are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from evalstop_detectors.roles.params import EVAL_TAG
from pydantic import AfterValidator, BaseModel, Field

from evalstop_service.domain.fields import remove_controls
from evalstop_service.domain.labels import MOST_LABEL_BYTES, count_bytes
from evalstop_service.domain.labels import MOST_LABELS as MOST_LABELS
from evalstop_service.store.mlflow import ATTRIBUTES, Clause
from evalstop_service.store.mlflow import RUN_NAME as RUN_NAME
from evalstop_service.store.mlflow import USER as USER
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.web.mlflow.protocol import invalid_parameter

EXPERIMENT = "mlflow.experiment"
PRESET = "evalstop.preset"
OBEYED = "evalstop.obeyed"
"""The tag with the id of the decision that the trainer obeys when it ends the run."""
OWN = "evalstop."
CHECKPOINT = "evalstop.checkpoint."
"""A tag `evalstop.checkpoint.STEP` has the URI of the checkpoint of that step."""

MOST_PARAMS = 2000
MOST_PARAM_BYTES = 256 * 1024
LONGEST_NAME, LONGEST_VALUE = 256, 2000

Item = tuple[str, str]
"""The key and the value of a param or a tag."""


class Merged(NamedTuple):
    """The labels or params, and how many items did not fit."""

    labels: dict[str, str]
    dropped: int


def merge_tags(labels: Mapping[str, str], tags: Iterable[Item]) -> Merged:
    """The labels of a run with these tags added. A tag takes its last value."""
    return merge_items(labels, (item for item in tags if is_client_tag(clean_text(item[0]))))


def merge_params(params: Mapping[str, str], new: Iterable[Item]) -> Merged:
    """The params of a run with these added. A param keeps its first value."""
    unknown = (item for item in new if clean_text(item[0]) not in params)
    return merge_items(params, unknown, MOST_PARAMS, MOST_PARAM_BYTES)


def merge_items(
    current: Mapping[str, str], new: Iterable[Item], most: int = MOST_LABELS, most_bytes: int = MOST_LABEL_BYTES
) -> Merged:
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
    return Merged(merged, dropped)


def is_client_tag(name: str) -> bool:
    """Whether clients may set the tag of this name."""
    return name in (PRESET, EVAL_TAG, OBEYED) or not (name in ("", EXPERIMENT) or name.startswith(OWN))


MAX_METRICS, MAX_PARAMS, MAX_TAGS, MAX_BATCH_ITEMS = 1000, 100, 100, 1000
"""MLflow's own limits for a batch."""
MAX_OUTPUTS = 100
MAX_PAGE = 50
"""The most experiments or runs of a page: the params and tags of one may have 320 KiB."""

Document = dict[str, Any]
"""A JSON document of MLflow's API."""

_NAME = re.compile(r"[/\w.\- :@]+")
_PATH_TRAVERSAL = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")
_LAST_MILLISECOND = 253_402_300_799_999  # of the year 9999
_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or _PATH_TRAVERSAL.search(name):
        raise ValueError("a name has letters, digits, blanks and _ - . : @ / only, and is not a relative path")
    return name


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A number or, as protobuf writes an int64 in JSON, a text; a double may be one of NaN, Infinity, -Infinity too."""
Key = Annotated[str, Field(min_length=1, max_length=250)]
Text = Annotated[str, Field(max_length=100_000)]
Filter = Annotated[str, Field(max_length=10_000)]
View = Literal["ACTIVE_ONLY", "ALL"]
"""Nothing is deleted here."""


class MetricIn(BaseModel):
    """One value of one metric."""

    key: Annotated[Key, AfterValidator(_check_name)]
    value: float
    timestamp: Whole
    step: Whole | None = None

    def to_observation(self) -> PostedObservation | None:
        """The observation; None if its step is negative or too large for JSON numbers."""
        step = self.step or 0
        if not 0 <= step <= MAX_STEP:
            return None
        time = parse_milliseconds(self.timestamp) if 0 < self.timestamp <= _LAST_MILLISECOND else None
        return PostedObservation(self.key, step, self.value, None, time)


class ItemIn(BaseModel):
    """A param or a tag."""

    key: Key
    value: Text = ""


def list_items(received: Iterable[ItemIn]) -> list[Item]:
    """The keys and the values."""
    return [(item.key, item.value) for item in received]


class RunBody(BaseModel):
    """A request about a run."""

    run_id: UUID


class LogMetric(MetricIn, RunBody):
    """runs/log-metric."""


class LogItem(ItemIn, RunBody):
    """runs/log-parameter and runs/set-tag."""


class LogBatch(RunBody):
    """runs/log-batch."""

    metrics: Annotated[list[MetricIn], Field(max_length=MAX_METRICS)] = []
    params: Annotated[list[ItemIn], Field(max_length=MAX_PARAMS)] = []
    tags: Annotated[list[ItemIn], Field(max_length=MAX_TAGS)] = []


class CreateRun(BaseModel):
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


class Output(BaseModel):
    """A logged model that a run created."""

    model_id: Annotated[str, Field(max_length=200)] = ""
    step: Whole | None = None


class LogOutputs(RunBody):
    """runs/outputs."""

    models: Annotated[list[Output], Field(max_length=MAX_OUTPUTS)] = []


class CreateModel(BaseModel):
    """Creation of a logged model."""

    experiment_id: str = "0"
    name: Annotated[str, Field(max_length=500)] = ""
    source_run_id: Annotated[str, Field(max_length=100)] = ""


class FinalizeModel(BaseModel):
    """Whether a logged model was saved completely."""

    status: Annotated[str, Field(max_length=100)] = ""


class CreateExperiment(BaseModel):
    """experiments/create."""

    name: Annotated[str, Field(min_length=1, max_length=500)]
    artifact_location: Annotated[str, Field(max_length=LONGEST_VALUE)] = ""
    tags: Annotated[list[ItemIn], Field(max_length=MAX_TAGS)] = []


class SearchExperiments(BaseModel):
    """experiments/search."""

    filter: Filter = ""
    order_by: Annotated[list[Filter], Field(max_length=0)] = []
    max_results: Annotated[Whole, Field(ge=1, le=50_000)] = MAX_PAGE
    page_token: Annotated[str | None, Field(pattern=r"^[0-9]{1,9}$")] = None
    view_type: View = "ACTIVE_ONLY"

    @property
    def offset(self) -> int:
        """The number of items before the page."""
        return int(self.page_token or 0)

    @property
    def limit(self) -> int:
        """The number of items of the page."""
        return min(self.max_results, MAX_PAGE)

    def make_page(self, name: str, documents: Sequence[Document], *, is_last: bool) -> Document:
        """The answer."""
        token = {} if is_last else {"next_page_token": str(self.offset + self.limit)}
        return {name: documents, **token}


class SearchRuns(SearchExperiments):
    """runs/search."""

    experiment_ids: Annotated[list[Annotated[str, Field(pattern=r"^[0-9]{1,100}$")]], Field(max_length=1000)] = []
    run_view_type: View = "ACTIVE_ONLY"


def parse_milliseconds(milliseconds: int) -> datetime:
    """A time from milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def to_milliseconds(time: datetime) -> int:
    """A time in milliseconds since 1970."""
    return round(time.timestamp() * 1000)


def is_uuid(text: str) -> bool:
    """Whether a text is an id as this service creates them."""
    return _UUID.fullmatch(text) is not None


_KINDS = dict.fromkeys(("attr", "attribute", "run"), "attributes") | {
    "tag": "tags",
    "param": "params",
    "parameter": "params",
}

MAX_CLAUSES = 20
"""Comparisons in a filter: each is computed for every run."""

_CLAUSE = re.compile(
    r"(?:(?P<kind>attr|attribute|run|tag|param|parameter)s?\s*\.\s*)?(?P<key>`[^`\"\\]+`|\"[^\"\\]+\"|[\w.\-/]+)\s*(?P<sign>!=|=)\s*"
    r"(?P<value>'[^']*'|\"[^\"]*\")(?P<more>\s*(?:and\b\s*)?)",
    re.IGNORECASE,
)
"""A comparison, with the AND after it. Its key can't end the path by which SQLite finds a member of a document."""


def parse_filter(text: str) -> list[Clause]:
    """The clauses of a filter: texts compared by = or !=, joined by AND; raises MlflowError.

        tags.team = 'red' AND params.optimizer != 'adam' AND status = 'FINISHED'

    Unknown syntax is an error, because ignoring it would select too much.
    """
    clauses: list[Clause] = []
    text, at, joined = text.strip(), 0, False
    while at < len(text) or joined:
        match = _CLAUSE.match(text, at)
        kind = "attributes" if match is None else _KINDS[(match["kind"] or "attribute").lower()]
        key = "" if match is None else match["key"].strip('`"')
        if (
            match is None
            or (clauses and not joined)
            or (kind == "attributes" and key not in ATTRIBUTES)
            or clean_text(text) != text
        ):
            raise invalid_parameter(
                f"Invalid filter string {text!r:.300}: join comparisons of texts such as tags.key = 'value', "
                f"params.key != '1' or status = 'FINISHED' by AND; the attributes are {', '.join(ATTRIBUTES)}"
            )
        clauses.append(Clause(kind, key, match["sign"], match["value"][1:-1]))
        at, joined = match.end(), bool(match["more"].strip())
    if len(clauses) > MAX_CLAUSES:
        raise invalid_parameter(f"a filter may have {MAX_CLAUSES} comparisons; this one has {len(clauses)}")
    return clauses


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    return remove_controls(text, "\n\t")

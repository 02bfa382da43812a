"""The route of scrapes: a trainer's metrics in OpenMetrics or Prometheus's text format, translated to observations.

Gauges, counters and untyped metrics are stored; histograms and summaries are distributions, not values. A sample with
labels is a separate metric, named as in the scrape: `reward{split="val"}`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

from evalstop_service.decisions.commands import tell_trainer
from evalstop_service.domain.fields import Name, check_text
from evalstop_service.errors import Invalid
from evalstop_service.ingest import Message, Observations
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.observations import MAX_POINTS, ReceiptOut, receipt_json
from evalstop_service.web.api.schemas import MAX_STEP, RunId, Step
from evalstop_service.web.context import Commit, Ctx, Ingest, Tell
from evalstop_service.web.limits import in_thread
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

_TAKEN = ("gauge", "counter", "unknown", "untyped")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LONGEST_NAME = 256
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*+("|$)')  # an open one ends with the line

MOST_SCRAPE_BYTES = 2**20
MOST_LINE_BYTES, MOST_LABELS = 16 * 1024, 64
"""Limits of a line. The parsers copy the rest of a line for each label: the cost grows quadratically with its
length."""


router = APIRouter(prefix="/runs/{run_id}/openmetrics", tags=["observations"])

OPENMETRICS = "application/openmetrics-text"
TAKEN = (OPENMETRICS, "text/plain", "application/x-www-form-urlencoded")
"""The last is curl's default for a body."""

_REQUEST = {
    "requestBody": {
        "required": True,
        "description": f"`{OPENMETRICS}` is parsed strictly; anything else as Prometheus's text format.",
        "content": {"text/plain": {"schema": {"type": "string", "examples": ["eval_accuracy 0.61\n"]}}},
    }
}


@dataclass(frozen=True)
class Stepping:
    """Where the step of a sample comes from: one step for all, a label, or another metric; else its timestamp."""

    step: int | None = None
    label: str | None = None
    metric: str | None = None


@router.post("", response_model=ReceiptOut, openapi_extra=_REQUEST)
async def post_scrape(
    run_id: RunId,
    request: Request,
    caller: Ingest,
    committer: Commit,
    clock: Tell,
    context: Ctx,
    step: Annotated[Step | None, Query(description="the step of all values")] = None,
    step_label: Annotated[Name | None, Query(description="the label that holds each value's step")] = None,
    step_metric: Annotated[Name | None, Query(description="the metric of the scrape that is the step")] = None,
    metric: Annotated[list[Name] | None, Query(max_length=100, description="store only these metrics")] = None,
) -> Response:
    """Store the gauges and counters of a scrape and return the verdict. The default step is each value's time in
    seconds."""
    if sum(source is not None for source in (step, step_label, step_metric)) > 1:
        raise Invalid("set at most one of step, step_label and step_metric")
    media_type = request.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
    if media_type not in TAKEN:
        raise Problem(415, ProblemKind.NOT_A_SCRAPE, f"send it as `Content-Type: {OPENMETRICS}` or `text/plain`")
    body = await request.body()
    if len(body) > MOST_SCRAPE_BYTES:
        raise Problem(413, ProblemKind.SCRAPE_TOO_LARGE, "the limit is 1 MiB; nothing was stored. Send it in parts")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not UTF-8. Nothing was stored"
        raise Problem(400, ProblemKind.UNREADABLE_TEXT, detail) from error
    read = partial(
        read_observations,
        text,
        Stepping(step, step_label, step_metric),
        metric or (),
        strict=media_type == OPENMETRICS,
    )
    points = await in_thread(read)()
    receipt = await committer.submit(Message(caller.project_id, run_id, Observations(points), caller.key.id))
    should_stop = await in_thread(tell_trainer)(context.database, clock, receipt.decision)
    return Response(receipt_json(receipt, should_stop, clock()), media_type="application/json")


def read_observations(
    text: str, stepping: Stepping, only: Collection[str] = (), *, strict: bool = False
) -> tuple[PostedObservation, ...]:
    """The observations in a scrape; `only`: the names of metrics to read. Raises Invalid.

    `strict`: it is OpenMetrics. Samples without the step label are skipped.
    """
    _check_lines(text)
    samples = _parse_samples(text, strict)
    if stepping.metric is not None:
        stepping = Stepping(_find_step(samples, stepping.metric))
    points = []
    for sample in samples:
        if only and sample.name not in only:
            continue
        step = _find_sample_step(sample, stepping)
        if step is not None:
            name = _make_name(
                sample.name, {key: value for key, value in sample.labels.items() if key != stepping.label}
            )
            points.append(PostedObservation(name, step, float(sample.value)))
    if not points:
        raise Invalid("the scrape has no gauge or counter to store; nothing was stored")
    if len(points) > MAX_POINTS:
        raise Invalid(f"the scrape has {len(points)} values; the limit is {MAX_POINTS}. Select some with `metric`")
    return tuple(points)


def _check_lines(text: str) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if (size := len(line.encode(errors="surrogatepass"))) > MOST_LINE_BYTES:
            raise Invalid(f"line {number} has {size} bytes; the limit is {MOST_LINE_BYTES}. Nothing was stored")
        if line.startswith("#") or max(line.count("="), line.count(",")) <= MOST_LABELS:
            continue
        outside = _QUOTED.sub(lambda quoted: "" if quoted[1] else quoted[0], line)
        if max(outside.count("="), outside.count(",")) > MOST_LABELS:
            raise Invalid(f"line {number} has more than {MOST_LABELS} labels; nothing was stored")


def _parse_samples(text: str, strict: bool) -> list[Sample]:
    families = (openmetrics if strict else prometheus).text_string_to_metric_families
    try:
        return list(_select_samples(families(text)))
    except Exception as error:  # the parser raises various errors
        kind = "OpenMetrics" if strict else "the text format of Prometheus"
        message = _ADDRESS.sub("...", str(error))[:300]
        raise Invalid(f"the body is not {kind}: {message or type(error).__name__}; nothing was stored") from error


def _select_samples(families: Iterable[Any]) -> Iterator[Sample]:
    for family in families:
        if family.type in _TAKEN:
            yield from (sample for sample in family.samples if not sample.name.endswith("_created"))


def _find_step(samples: Iterable[Sample], metric: str) -> int:
    values = {sample.value for sample in samples if sample.name == metric}
    if len(values) != 1:
        raise Invalid(f"step_metric {metric!r:.100} has {len(values)} values in the scrape; it must have one")
    return _parse_whole_number(values.pop(), f"the value of step_metric {metric!r:.100}")


def _find_sample_step(sample: Sample, stepping: Stepping) -> int | None:
    if stepping.step is not None:
        return stepping.step
    if stepping.label is not None:
        text = sample.labels.get(stepping.label)
        return None if text is None else _parse_whole_number(text, f"label {stepping.label!r:.100} of {sample.name}")
    if sample.timestamp is None:
        raise Invalid(f"{sample.name} has no timestamp to use as its step; set `step`, `step_label` or `step_metric`")
    return _parse_whole_number(math.floor(float(sample.timestamp)), f"the timestamp of {sample.name}")


def _parse_whole_number(value: float | str, where: str) -> int:
    try:
        step = float(value)
    except ValueError:
        step = math.nan
    if not (step.is_integer() and 0 <= step <= MAX_STEP):
        raise Invalid(f"{where} is {value!r:.100}; a step is a whole number from 0 to {MAX_STEP}")
    return int(step)


def _make_name(name: str, labels: Mapping[str, str]) -> str:
    if labels:
        pairs = ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sorted(labels.items()))
        name = f"{name}{{{pairs}}}"
    try:
        check_text(name)
    except ValueError as error:
        raise Invalid(f"metric {name!r:.100}: {error}") from error
    if len(name) > _LONGEST_NAME:
        detail = f"has {len(name)} characters with its labels; the limit is {_LONGEST_NAME}"
        raise Invalid(f"metric {name!r:.100} {detail}")
    return name

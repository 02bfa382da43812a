"""Whatever texts a trainer gives, the service takes its opening, or the constructor says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from evalstop_client import ConfigurationError, Run
from evalstop_service.domain.labels import find_objection
from evalstop_service.web.api.runs import RunIn
from evalstop_service.web.limits import MAX_BODY_BYTES
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

TEXTS = st.builds(lambda text, times: text * times, st.text(max_size=12), st.sampled_from([1, 1, 1, 30, 3000]))

ROLES = st.fixed_dictionaries(
    {"role": st.sampled_from(["eval", "proxy", "kl", "loss"])},
    optional={
        "direction": st.sampled_from(["maximize", "minimize"]),
        "version": TEXTS,
        "weight": st.floats(),
        "critical": st.booleans(),
    },
)


def open_offline(name: str = "a run", **arguments: Any) -> dict[str, Any]:
    """The body by which a run with these arguments is opened."""
    run = Run(name, **arguments)
    run.finish()
    return dict(run._settings.opening)


def validate_opening(opening: dict[str, Any]) -> RunIn:
    """The opening as the service reads it."""
    return RunIn.model_validate_json(json.dumps(opening))


def is_taken(**fields: Any) -> bool:
    """Whether the service opens a run with these fields."""
    try:
        return find_objection(validate_opening({"name": "a run", **fields}).labels or {}) is None
    except ValidationError:
        return False


@given(TEXTS.filter(bool), TEXTS, TEXTS, st.lists(TEXTS.filter(bool), max_size=60), TEXTS)
@example("x" * 257, "one\ntwo", "\ud800", ["x" * 101], "x" * 20_001)
def test_any_name_and_description_is_taken(name: str, owner: str, group: str, tags: list[str], notes: str) -> None:
    """A run is watched whatever it is called and however it is described."""
    validate_opening(open_offline(name, owner=owner, group=group, tags=tags, notes=notes))


@given(st.dictionaries(TEXTS, TEXTS, max_size=3))
@example({"x" * 257: "y"})
@example({"x": "y" * 2001})
@example({"x": "\0"})
@example({str(number): "" for number in range(101)})
@example({str(number): "\N{SNAKE}" * 2000 for number in range(40)})
def test_labels_are_taken_or_refused_at_once(labels: dict[str, str]) -> None:
    """Labels find the job: they are sent as they are, or the constructor raises."""
    if is_taken(labels=labels):
        assert open_offline(labels=labels).get("labels", {}) == labels
    else:
        with pytest.raises(ConfigurationError, match="labels"):
            open_offline(labels=labels)


@given(st.dictionaries(TEXTS, ROLES, max_size=3))
@example({"x" * 257: {"role": "eval"}})
@example({"eval": {"role": "eval", "version": "x" * 101}})
@example({"eval": {"role": "eval", "version": ""}})
@example({str(number): {"role": "eval"} for number in range(33)})
def test_metrics_are_taken_or_refused_at_once(metrics: Any) -> None:
    """A declaration that the service would refuse is a ConfigurationError."""
    if is_taken(metrics=metrics):
        assert (
            validate_opening(open_offline(metrics=metrics)).metrics
            == validate_opening({"name": "a run", "metrics": metrics}).metrics
        )
    else:
        with pytest.raises(ConfigurationError, match="metrics"):
            open_offline(metrics=metrics)


def test_largest_opening_fits_a_body() -> None:
    """All that a trainer can give, in the characters that take most bytes, is within the service's limit."""
    value, name = "\N{SNAKE}" * 2000, "\N{SNAKE}" * 250
    opening = open_offline(
        name=name,
        owner=name,
        group=name,
        tags=[name] * 50,
        notes="\N{SNAKE}" * 20_000,
        labels={f"{name}{number}": value for number in range(28)},
        metrics={f"{name}{number}": {"role": "eval"} for number in range(32)},
        config={f"{name}{number}": value for number in range(1000)},
    )
    assert opening["params"]
    assert len(json.dumps(opening)) <= MAX_BODY_BYTES
    validate_opening(opening)


def test_long_names_that_begin_alike_differ() -> None:
    """Two runs of a sweep whose names differ late keep names of their own."""
    names = [open_offline("lr=" + "0" * 300 + end)["name"] for end in "12"]
    assert names[0] != names[1]
    assert open_offline("ä" * 256)["name"] == "ä" * 256

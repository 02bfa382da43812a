"""Whatever texts a trainer describes its run by, the service takes its opening."""

from __future__ import annotations

import json
from typing import Any

from evalstop_client import Run
from evalstop_service.web.api.runs import RunIn
from evalstop_service.web.limits import MAX_BODY_BYTES
from hypothesis import example, given
from hypothesis import strategies as st

TEXTS = st.builds(lambda text, times: text * times, st.text(max_size=12), st.sampled_from([1, 1, 1, 30, 3000]))


def open_offline(name: str = "a run", **arguments: Any) -> dict[str, Any]:
    """The body by which a run with these arguments is opened."""
    run = Run(name, **arguments)
    run.finish()
    return dict(run._settings.opening)


def validate_opening(opening: dict[str, Any]) -> RunIn:
    """The opening as the service reads it."""
    return RunIn.model_validate_json(json.dumps(opening))


@given(TEXTS.filter(bool), TEXTS, TEXTS, st.lists(TEXTS.filter(bool), max_size=60), TEXTS)
@example("x" * 257, "one\ntwo", "\ud800", ["x" * 101], "x" * 20_001)
def test_any_name_and_description_is_taken(name: str, owner: str, group: str, tags: list[str], notes: str) -> None:
    """A run is watched whatever it is called and however it is described."""
    validate_opening(open_offline(name, owner=owner, group=group, tags=tags, notes=notes))


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

"""The cost of reading a scrape is linear in its size, and limited."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from evalstop_service.errors import Invalid
from evalstop_service.store.database import Database
from evalstop_service.web.api.openmetrics import Stepping, read_observations

from tests.security.served_project import serve_project
from tests.service.web.api.api_calls import expect_json, expect_problem


def build_scrape(lines: int, labels: int, length: int = 3) -> str:
    label_text = ",".join(f'{"k" * length}{index}="v"' for index in range(labels))
    return "".join(f"reward_{line}{{{label_text}}} 0.5\n" for line in range(lines))


@pytest.mark.parametrize(
    ("scrape", "expected_detail"),
    [
        (build_scrape(1, 65), "64 labels"),
        (build_scrape(1, 50_000), "bytes"),
        (f'reward{{a="{"x" * 20_000}"}} 1\n', "bytes"),
        ("# HELP x y\nreward 1\n" * 60_000, "1 MiB"),
    ],
    ids=["labels", "many labels", "long line", "long scrape"],
)
def test_scrape_over_a_limit_is_refused(database: Database, scrape: str, expected_detail: str) -> None:
    """A line may have 16 KiB and 64 labels, and a scrape 1 MiB; the refusal names the limit."""
    with serve_project(database) as project:
        client = project.open_client()
        run = expect_json(client.post("/runs", json={"name": "r"}), 201)["id"]
        answer = client.post(f"/runs/{run}/openmetrics?step=1", content=scrape, timeout=300)
        assert expected_detail in expect_problem(answer, 413, 422)["detail"]


def count_calls(work: Callable[[], Any]) -> int:
    """The number of function calls, of C functions too, that the work makes."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("strict", [False, True])
def test_cost_of_a_scrape_is_linear_in_its_lines(strict: bool) -> None:
    """Twice as many lines take about twice as many function calls."""
    end = "# EOF\n" if strict else ""

    def cost(lines: int) -> int:
        text = build_scrape(lines, 20) + end
        return count_calls(lambda: read_observations(text, Stepping(1), strict=strict))

    assert cost(200) < 2.1 * cost(100)


@pytest.mark.parametrize("strict", [False, True])
def test_line_with_many_labels_is_refused_cheaply(strict: bool) -> None:
    """The refusal takes far less than one function call per label."""

    def cost(labels: int) -> int:
        text = build_scrape(1, labels)

        def refuse() -> None:
            with pytest.raises(Invalid, match=r"labels|bytes"):
                read_observations(text, Stepping(1), strict=strict)

        return count_calls(refuse)

    assert cost(20_000) < 2_000


@pytest.mark.parametrize("strict", [False, True])
def test_commas_in_label_values_do_not_count_as_labels(strict: bool) -> None:
    """Only labels outside of quotes count towards the limit."""
    end = "# EOF\n" if strict else ""
    value = ",a=" * 60
    (point,) = read_observations(f'reward{{split="{value}"}} 1\n{end}', Stepping(1), strict=strict)
    assert point.metric == f'reward{{split="{value}"}}'
    labels = ",".join(f'k{index}=""' for index in range(10, 40))
    assert len(read_observations(f"reward{{{labels}}} 1\n{end}", Stepping(1), strict=strict)) == 1


@pytest.mark.parametrize("end", ["", "\\"])
def test_open_quote_is_refused_cheaply(end: str) -> None:
    """However many escaped quotes follow one that is not closed: in the square of their number, the lines exceed the
    test's timeout."""
    line = f'reward{{a="{",=" * 65}{chr(92)}"' + '\\"' * 8000 + end
    for _ in range(1000):
        with pytest.raises(Invalid, match="labels"):
            read_observations(line + "\n", Stepping(1))

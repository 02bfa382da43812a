"""A scrape costs what it holds: no line of many labels makes the service work for minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.errors import Invalid
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from evalstop_service.web.api.reading.openmetrics import Stepping, read_observations

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import expect_json, expect_problem


def write_scrape(lines: int, labels: int, length: int = 3) -> str:
    written = ",".join(f'{"k" * length}{index}="v"' for index in range(labels))
    return "".join(f"reward_{line}{{{written}}} 0.5\n" for line in range(lines))


@pytest.mark.parametrize(
    ("scrape", "words"),
    [
        (write_scrape(1, 65), "64 labels"),
        (write_scrape(1, 50_000), "bytes"),
        (f'reward{{a="{"x" * 20_000}"}} 1\n', "bytes"),
        ("# HELP x y\nreward 1\n" * 60_000, "1 MiB"),
    ],
    ids=["labels", "many labels", "long line", "long scrape"],
)
def test_a_scrape_has_limits(database: Database, scrape: str, words: str) -> None:
    """A line may hold 16 KiB and 64 labels, a scrape 1 MiB; what is larger is refused with the limit."""
    create_project(database, "p", "enforce", 0.0, utc_now(), "paper")
    key = api_keys.create_named_key(database, "p", "k", ["admin"], utc_now())[1]
    headers = {"Authorization": f"Bearer {key}"}
    with (
        start_server(database) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False, verify=get_ssl_context()) as client,
    ):
        run = expect_json(client.post("/runs", json={"name": "r"}), 201)["id"]
        answer = client.post(f"/runs/{run}/openmetrics?step=1", content=scrape, timeout=300)
        assert words in expect_problem(answer, 413, 422)["detail"]


def count_calls(work: Callable[[], Any]) -> int:
    """How many calls of functions the work makes, those of C included."""
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
def test_a_scrape_costs_what_it_holds(strict: bool) -> None:
    """Twice as many lines cost twice as many calls, whatever their labels."""
    end = "# EOF\n" if strict else ""

    def cost(lines: int) -> int:
        text = write_scrape(lines, 20) + end
        return count_calls(lambda: read_observations(text, Stepping(1), strict=strict))

    assert cost(200) < 2.1 * cost(100)


@pytest.mark.parametrize("strict", [False, True])
def test_a_line_of_many_labels_is_refused_before_it_is_read(strict: bool) -> None:
    """Refusing a line of many labels costs far less than a call for each."""

    def cost(labels: int) -> int:
        text = write_scrape(1, labels)

        def refuse() -> None:
            with pytest.raises(Invalid, match=r"labels|bytes"):
                read_observations(text, Stepping(1), strict=strict)

        return count_calls(refuse)

    assert cost(20_000) < 2_000


@pytest.mark.parametrize("strict", [False, True])
def test_quotes_and_hashes_count_for_nothing_in_values(strict: bool) -> None:
    """What stands in the value of a label is no label."""
    end = "# EOF\n" if strict else ""
    value = ",a=" * 60
    (point,) = read_observations(f'reward{{split="{value}"}} 1\n{end}', Stepping(1), strict=strict)
    assert point.metric == f'reward{{split="{value}"}}'
    labels = ",".join(f'k{index}=""' for index in range(10, 40))
    assert len(read_observations(f"reward{{{labels}}} 1\n{end}", Stepping(1), strict=strict)) == 1

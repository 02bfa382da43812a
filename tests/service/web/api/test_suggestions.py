"""Common mistakes of new users are answered with what was wrong."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest
from evalstop_service.web import problems

from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.conftest import ON_SQLITE

pytestmark = ON_SQLITE


@pytest.mark.parametrize(
    ("body", "pointer", "detail"),
    [
        ({"polcy": "paper"}, "/polcy", "the fields are owner, group, tags, notes, name, metrics, labels, policy"),
        ({"metrics": {"gold": "eval"}}, "/metrics/gold", "this should be an object"),
        ({"metrics": {"gold": {"role": "evl"}}}, "/metrics/gold/role", "'eval'"),
        ({"metrics": {"gold": {"role": "eval", "x": "minimize"}}}, "/metrics/gold/x", "role, direction, weight"),
        ({"metrics": "atuo"}, "/metrics", "'auto'"),
        ({"mode": "enforced"}, "/mode", "'enforce'"),
    ],
)
def test_mistyped_word_is_one_error(admin: httpx.Client, body: dict[str, Any], pointer: str, detail: str) -> None:
    """The pointer names the word as it was sent, the detail what is accepted; the code is for programs."""
    document = expect_problem(admin.post("/runs", json={"name": "x"} | body), 422)
    (error,) = document["errors"]
    assert error["pointer"] == pointer
    assert detail in error["detail"]
    assert document["code"] == "invalid_request"


def test_unknown_query_parameter_is_refused(admin: httpx.Client) -> None:
    """An ignored filter would list runs that were not asked for."""
    (error,) = expect_problem(admin.get("/runs", params={"stat": "running"}), 422)["errors"]
    assert error == {"pointer": "query stat", "detail": "there is no such parameter"}
    assert "no parameters" in expect_problem(admin.get("/project", params={"name": "x"}), 422)["detail"]


def test_unknown_query_parameters_are_listed_up_to_100(admin: httpx.Client) -> None:
    """To compare thousands of names with the accepted ones would stop the process for a second."""
    document = expect_problem(admin.get("/runs", params={f"stat{index}": "x" for index in range(1000)}), 422)
    assert len(document["errors"]) == problems.MOST_ERRORS


def test_unwatched_metrics_are_listed_until_the_eval_arrives(admin: httpx.Client) -> None:
    """Until then a mistyped name is listed as unwatched beside the missing one, as is an unrecognized eval."""
    declared = expect_json(
        admin.post("/runs", json={"name": uuid.uuid4().hex, "metrics": {"gold": {"role": "eval"}}}), 201
    )
    undeclared = expect_json(admin.post("/runs", json={"name": uuid.uuid4().hex, "metrics": "auto"}), 201)

    def post(run: dict[str, Any], step: int, *metrics: str) -> tuple[dict[str, str], list[str]]:
        points = [{"metric": metric, "step": step, "value": 0.5} for metric in metrics]
        answer = expect_json(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 200)
        return answer["missing"], answer["unwatched"]

    assert post(declared, 1, "gould") == ({"gold": "eval"}, ["gould"])
    assert post(declared, 2, "gold") == ({}, [])
    assert post(undeclared, 1, "quality", "reward") == ({}, ["quality"])
    assert post(undeclared, 2, "eval_accuracy") == ({}, [])


def test_mlflow_path_without_its_prefix_gets_a_hint(admin: httpx.Client) -> None:
    """A tracking URI without the prefix of MLflow's API is answered with the right ending of the URI."""
    url = admin.base_url.copy_with(path="/api/2.0/mlflow/experiments/search")
    assert "the URI ends in /mlflow" in expect_problem(admin.post(url, json={}), 404)["detail"]


def test_problem_type_links_to_its_explanation(admin: httpx.Client) -> None:
    """The page of problems has an anchor for each code."""
    document = expect_problem(admin.get("/nosuch"), 404)
    page = admin.get(admin.base_url.copy_with(path="/problems"))
    assert page.status_code == 200
    assert f'id="{document["type"].partition("#")[2]}"' in page.text

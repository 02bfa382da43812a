"""Common mistakes of new users are answered with what was probably meant."""

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
    ("body", "pointer", "suggestion"),
    [
        ({"polcy": "paper"}, "/polcy", "there is no such field; did you mean 'policy'?"),
        ({"metrics": {"gold": "eval"}}, "/metrics/gold", "this should be an object"),
        ({"metrics": {"gold": {"role": "evl"}}}, "/metrics/gold/role", "did you mean 'eval'?"),
        ({"metrics": {"gold": {"role": "eval", "directoin": "minimize"}}}, "/metrics/gold/directoin", "'direction'?"),
        ({"metrics": "atuo"}, "/metrics", "did you mean 'auto'?"),
        ({"mode": "enforced"}, "/mode", "did you mean 'enforce'?"),
    ],
)
def test_mistyped_word_is_one_error_with_a_suggestion(
    admin: httpx.Client, body: dict[str, Any], pointer: str, suggestion: str
) -> None:
    """The pointer names the word as it was sent, and the problem has a code for programs."""
    document = expect_problem(admin.post("/runs", json={"name": "x"} | body), 422)
    (error,) = document["errors"]
    assert error["pointer"] == pointer
    assert suggestion in error["detail"]
    assert document["code"] == "invalid_request"


@pytest.mark.parametrize(("excess", "suggests"), [(0, True), (1, False)])
def test_long_word_is_not_compared(excess: int, suggests: bool) -> None:
    """To compare a word of megabytes with the accepted ones would stop the process for as long."""
    written = "x" * (problems.LONGEST_COMPARED + excess)
    assert bool(problems.suggest_similar(written, [written + "y"])) == suggests


def test_unknown_query_parameter_is_refused(admin: httpx.Client) -> None:
    """An ignored filter would list runs that were not asked for."""
    (error,) = expect_problem(admin.get("/runs", params={"stat": "running"}), 422)["errors"]
    assert error == {"pointer": "query stat", "detail": "there is no such parameter; did you mean 'status'?"}
    assert "no parameters" in expect_problem(admin.get("/project", params={"name": "x"}), 422)["detail"]


def test_unknown_query_parameters_are_listed_up_to_100(admin: httpx.Client) -> None:
    """To compare thousands of names with the accepted ones would stop the process for a second."""
    document = expect_problem(admin.get("/runs", params={f"stat{index}": "x" for index in range(1000)}), 422)
    assert len(document["errors"]) == problems.MOST_ERRORS


def test_trailing_slash_is_redirected(admin: httpx.Client) -> None:
    """The redirect keeps the method, the body and the query."""
    document = expect_problem(response := admin.post("/runs/", params={"a": "1"}, json={"name": "x"}), 308)
    assert (response.headers["location"], document["code"]) == ("/api/v1/runs?a=1", "moved")
    encoded = admin.get("/runs/%E2%82%AC%0D%0A/")
    assert (encoded.status_code, encoded.headers["location"]) == (308, "/api/v1/runs/%E2%82%AC")
    expect_problem(admin.get("/nosuch/"), 404)


def test_key_without_its_scheme_is_recognized(admin: httpx.Client) -> None:
    """An Authorization header with the key alone is answered with a hint at the missing scheme."""
    bare = {"Authorization": admin.headers["authorization"].removeprefix("Bearer ")}
    for answer in (admin.get("/runs", headers=bare), admin.post("/runs", headers=bare, json={"name": "x"})):
        assert "without the scheme before it" in expect_problem(answer, 401)["detail"]


def test_unknown_key_is_distinguished_from_a_missing_one(admin: httpx.Client) -> None:
    """The detail says whether the key is unknown or the header is missing."""
    assert (
        "the key is unknown"
        in expect_problem(admin.get("/runs", headers={"Authorization": "Bearer esk_nosuch"}), 401)["detail"]
    )
    assert "send `Authorization" in expect_problem(admin.get("/runs", headers={"Authorization": ""}), 401)["detail"]


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

"""What a new user gets wrong is answered with what was meant."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.conftest import ON_SQLITE

pytestmark = ON_SQLITE


@pytest.mark.parametrize(
    ("body", "pointer", "meant"),
    [
        ({"polcy": "paper"}, "/polcy", "there is no such field; did you mean 'policy'?"),
        ({"metrics": {"gold": "eval"}}, "/metrics/gold", "this should be an object"),
        ({"metrics": {"gold": {"role": "evl"}}}, "/metrics/gold/role", "did you mean 'eval'?"),
        ({"metrics": {"gold": {"role": "eval", "directoin": "minimize"}}}, "/metrics/gold/directoin", "'direction'?"),
        ({"metrics": "atuo"}, "/metrics", "did you mean 'auto'?"),
        ({"mode": "enforced"}, "/mode", "did you mean 'enforce'?"),
    ],
)
def test_a_mistyped_word_is_one_error_that_says_what_was_meant(
    admin: httpx.Client, body: dict[str, Any], pointer: str, meant: str
) -> None:
    """The pointer leads to the word as it was sent, and the answer has a code that programs can go by."""
    document = expect_problem(admin.post("/runs", json={"name": "x"} | body), 422)
    (error,) = document["errors"]
    assert error["pointer"] == pointer
    assert meant in error["detail"]
    assert document["code"] == "invalid_request"


def test_an_unknown_parameter_is_refused(admin: httpx.Client) -> None:
    """A filter that is passed over would list what was not asked for."""
    (error,) = expect_problem(admin.get("/runs", params={"stat": "running"}), 422)["errors"]
    assert error == {"pointer": "query stat", "detail": "there is no such parameter; did you mean 'status'?"}
    assert "no parameters" in expect_problem(admin.get("/project", params={"name": "x"}), 422)["detail"]


def test_a_slash_at_the_end_is_redirected(admin: httpx.Client) -> None:
    """With the method, the body and the query that were sent."""
    document = expect_problem(moved := admin.post("/runs/", params={"a": "1"}, json={"name": "x"}), 308)
    assert (moved.headers["location"], document["code"]) == ("/api/v1/runs?a=1", "moved")
    expect_problem(admin.get("/nosuch/"), 404)


def test_a_key_without_its_scheme_is_recognized(admin: httpx.Client) -> None:
    """The header holds the key alone."""
    bare = {"Authorization": admin.headers["authorization"].removeprefix("Bearer ")}
    for answer in (admin.get("/runs", headers=bare), admin.post("/runs", headers=bare, json={"name": "x"})):
        assert "without the scheme before it" in expect_problem(answer, 401)["detail"]


def test_a_key_that_is_not_known_is_told_from_a_missing_one(admin: httpx.Client) -> None:
    """Whoever sent a key does not have to look for the header."""
    assert (
        "the key is unknown"
        in expect_problem(admin.get("/runs", headers={"Authorization": "Bearer esk_nosuch"}), 401)["detail"]
    )
    assert "send `Authorization" in expect_problem(admin.get("/runs", headers={"Authorization": ""}), 401)["detail"]


def test_what_nobody_watches_is_listed_until_the_eval_has_come(admin: httpx.Client) -> None:
    """A mistyped name stands among the unwatched beside the one that is missing; so does an eval nobody recognizes."""
    declared = expect_json(
        admin.post("/runs", json={"name": uuid.uuid4().hex, "metrics": {"gold": {"role": "eval"}}}), 201
    )
    left = expect_json(admin.post("/runs", json={"name": uuid.uuid4().hex, "metrics": "auto"}), 201)

    def post(run: dict[str, Any], step: int, *metrics: str) -> tuple[dict[str, str], list[str]]:
        points = [{"metric": metric, "step": step, "value": 0.5} for metric in metrics]
        answer = expect_json(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 200)
        return answer["missing"], answer["unwatched"]

    assert post(declared, 1, "gould") == ({"gold": "eval"}, ["gould"])
    assert post(declared, 2, "gold") == ({}, [])
    assert post(left, 1, "quality", "reward") == ({}, ["quality"])
    assert post(left, 2, "eval_accuracy") == ({}, [])


def test_mlflow_without_its_prefix_is_told_where_it_is(admin: httpx.Client) -> None:
    """A tracking URI that lacks the path of MLflow's API."""
    url = admin.base_url.copy_with(path="/api/2.0/mlflow/experiments/search")
    assert "the URI ends in /mlflow" in expect_problem(admin.post(url, json={}), 404)["detail"]


def test_every_code_is_explained(admin: httpx.Client) -> None:
    """The type of a problem leads to what its code means."""
    document = expect_problem(admin.get("/nosuch"), 404)
    page = admin.get(admin.base_url.copy_with(path="/problems"))
    assert page.status_code == 200
    assert f'id="{document["type"].partition("#")[2]}"' in page.text

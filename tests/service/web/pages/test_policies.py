"""The pages of policies, their rollout and their backtests."""

from __future__ import annotations

import html
import json
import re
from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.store.database import Database

from tests.service.case_rows import insert_cases
from tests.service.web.pages.recorded_runs import (
    LEVEL_POLICY,
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import SQLITE_ONLY, read_csrf_token

HACKING = load_recorded_evals("np-0044")


def level_document(**changes: Any) -> dict[str, Any]:
    """The document of the policy `level`, with these fields changed."""
    return LEVEL_POLICY | changes


@SQLITE_ONLY
def test_policies_are_shown(visitor: httpx.Client, tenant: Tenant) -> None:
    """The list has the project's and the shipped policies, a page one version; unknown ones are not found."""
    tenant.add_policy(level_document(min_evals=12, description="<b>slow</b>"))
    policy_list = visitor.get("/policies").text
    assert all(f'href="/policies/{name}"' in policy_list for name in ("level", "cautious", "paper"))
    assert "&lt;b&gt;slow" in policy_list
    page_text = visitor.get("/policies/level").text
    assert "min_evals" in page_text
    assert "description" in page_text
    assert "detectors needed to stop" in page_text
    assert "overridden guards" not in page_text, "the document does not state it"
    assert visitor.get("/policies/level?version=1").status_code == 200
    for path in ("/policies/level?version=9", "/policies/gone", f"/policies/backtests/{uuid4()}"):
        assert visitor.get(path).status_code == 404


@SQLITE_ONLY
def test_rollout_is_promoted_and_lowered(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """A policy's page starts its rollout, counts the cases to the next stage, and moves it up and down for a reason."""
    run, project_id, token = tenant.open_run("hacking"), tenant.id, read_csrf_token(visitor)
    page = f"/policies/{run.policy_name}"
    assert 'class="ladder"' not in visitor.get(page).text
    form = {"required_percent": "80", "canary_percent": "25", "csrf": token}
    assert visitor.post(f"{page}/stage", data=form).headers["location"] == f"{page}#stage"
    refused = visitor.post(f"{page}/stage", data=form | {"required_percent": "100"})
    assert (refused.status_code, "Required percent: Input should be less than 100." in refused.text) == (422, True)
    assert "No date can be estimated before the first decided case." in visitor.get(page).text
    insert_cases(database, run, 9, utc_now())
    decided = re.search(r"stage is decided by\s+<time>([\d-]+)</time>: (\d+) more cases", visitor.get(page).text)
    assert decided
    assert (decided[1], decided[2]) >= (f"{utc_now():%Y-%m-%d}", "20")
    insert_cases(database, run, 3, utc_now(), seconds=40.0)
    page_text = visitor.get(page).text
    assert re.search(r"at least \d+\.\d % right, of \d+\.\d %", page_text)
    assert "3 others do not" in page_text
    insert_cases(database, run, 51, utc_now())
    assert "proposes the step" in visitor.get(page).text
    rollout_stage.review_rollout_stage(database, project_id, run.policy_name, utc_now())
    (path,) = re.findall(r'action="(/proposals/[^"]+/confirm)"', visitor.get(page).text)
    assert path in visitor.get("/").text
    promoted = visitor.post(path, data={"csrf": token, "next": f"{page}#stage"})
    assert promoted.headers["location"] == f"{page}#stage"
    page_text = visitor.get(page).text
    assert "carries out 25 % of its stops" in page_text
    assert re.search(r'aria-current="step"><span class="figure">canary', page_text)
    assert path not in page_text
    assert visitor.post(f"{page}/stage/lower", data={"csrf": token}).status_code == 422
    assert visitor.post(f"{page}/stage/lower", data={"csrf": token, "reason": "<b>a new eval</b>"}).status_code == 303
    assert re.search(r'aria-current="step"><span class="figure">shadow', visitor.get(page).text)
    audited = visitor.get("/settings/audit").text
    assert "&lt;b&gt;a new eval" in audited


@SQLITE_ONLY
def test_list_shows_the_figures_of_each_measured_policy(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Each measured policy has its false stops; GPU-hours saved and those that it would have saved stand apart."""
    for policy, treatment in (("level", "stopped"), ("paper", "observed")):
        run = tenant.open_run(policy, policy=policy)
        insert_cases(database, run, 8, now, gpus=8.0, gpu_hours_saved=10.0, treatment=treatment)
        insert_cases(database, run, 2, now, outcome="wrong", run_outcome="healthy")
        insert_cases(database, run, 18, now, treatment=None, run_outcome="healthy")
    page_text = visitor.get("/policies").text
    assert page_text.count("10.0 %<span") == 2
    saved, would_have_saved = (
        re.findall(rf'data-hours="{word}">([\d.]+)<', page_text) for word in ("saved", "would_have_saved")
    )
    assert {*zip(saved, would_have_saved, strict=True)} == {("80", "0.0"), ("0.0", "80")}


@pytest.mark.slow
@SQLITE_ONLY
def test_draft_is_backtested_and_saved(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A draft is backtested and saved as the next version; an error is named at the field."""
    run = tenant.open_run("hacking")
    tenant.post_evals(run, HACKING)
    tenant.finish_run(run)
    page, token = "/policies/level/edit", read_csrf_token(visitor)
    assert "k_decline" in visitor.get(page).text
    draft = {"document": json.dumps(level_document(min_evals=12)), "csrf": token}
    assert visitor.post(f"{page}/try", data={"document": "{}"}).status_code == 403
    for invalid, message in (
        ('{"name": "level",\n "members": </textarea>', "this is not JSON: Expecting value: line 2 column 13"),
        ('{"name": "p", "members": [{"detector": "posterior", "stop_at": 1.7}]}', "is from 0 to 1"),
        ("[" * 5000, "nested too deep"),
        ('{"name": "level", "members": [{"detector": "k_declne"}]}', "$.members[0].detector"),
    ):
        for path in (page, f"{page}/try"):
            refused = visitor.post(path, data=draft | {"document": invalid})
            assert refused.status_code == 422
            assert message in refused.text
            assert html.escape(invalid[:500], quote=False) in refused.text.replace("&#34;", '"')
    tried = visitor.post(f"{page}/try", data=draft).headers["location"]
    result = visitor.get(tried).text
    assert "&#34;min_evals&#34;: 12" in result
    assert "1 run replayed" in result
    (details,) = re.findall(r'href="(/policies/backtests/[^"]+)"', result)
    assert f'href="/runs/{run.id}"' in visitor.get(details).text
    assert visitor.post(page, data=draft).headers["location"] == "/policies/level?version=2"
    assert "min_evals" in visitor.get("/policies/level?version=2").text
    other = add_tenant(database, now, "others")
    foreign = backtests.run_backtest(database, other.project.id, level_document(), 5, "eve", utc_now())
    for path in (f"/policies/backtests/{foreign.id}", f"{page}?backtest={foreign.id}", "/policies/gone/edit"):
        assert visitor.get(path).status_code == 404


def test_version_of_an_allowed_policy_waits_for_a_second_person(visitor: httpx.Client, tenant: Tenant) -> None:
    """The editor leads to the Overview, which shows the document to the person who confirms it; the API says so."""
    bearer, token = {"authorization": f"Bearer {tenant.secret}"}, read_csrf_token(visitor)
    visitor.patch("/api/v1/project", json={"second_person": True}, headers=bearer).raise_for_status()
    draft = level_document(min_evals=12)
    saved = visitor.post("/policies/level/edit", data={"document": json.dumps(draft), "csrf": token})
    assert (saved.status_code, saved.headers["location"]) == (303, "/#queue")
    page = html.unescape(visitor.get("/").text)
    assert "Add version 2 of policy level" in page
    assert '"min_evals": 12' in page
    answer = visitor.post("/api/v1/policies", json=draft, headers=bearer)
    assert answer.status_code == 202
    assert answer.json()["kind"] == "add_policy_version"
    assert answer.json()["document"]["name"] == "level"

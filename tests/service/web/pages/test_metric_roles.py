"""Metric roles on the run page: where they come from, what is missing, and corrections by a person."""

from __future__ import annotations

import re

import httpx
from evalstop_service.store import audit, keys, runs
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.web.pages.recorded_runs import Tenant
from tests.service.web.pages.serving import open_client, read_csrf_token, sign_in_by_link

HOSTILE_NAME = '<script>alert("x")</script>'


def open_run_with_unknown_eval(tenant: Tenant) -> Run:
    """Open a run with a proxy, a KL, and an eval whose name is not recognized."""
    run = tenant.open_run(metrics=None, recognise=True)
    points = [
        PostedObservation(metric, step, step / 10) for step in range(5) for metric in ("reward", "kl", HOSTILE_NAME)
    ]
    tenant.post_observations(run, points)
    return run


def test_roles_are_corrected_on_the_page(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """The page shows the origin of each role and the missing eval; roles set there replace the recognized ones."""
    run = open_run_with_unknown_eval(tenant)
    before = visitor.get(f"/runs/{run.id}").text
    assert "No metric is the eval score" in before
    assert "from its name" in before or "preset" in before
    form = {"eval": HOSTILE_NAME, "proxy": "reward", "eval_lower": ["true", "true"]}
    form |= {"entropy": "kl", "length": "", "none": "reward", "csrf": read_csrf_token(visitor)}
    answer = visitor.post(f"/runs/{run.id}/metrics", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run.id}")
    after = visitor.get(f"/runs/{run.id}").text
    assert "No metric is the eval score" not in after
    assert "set by a person" in after
    assert HOSTILE_NAME not in after
    with database.reading() as tx:
        stored = runs.find_run(tx, tenant.id, run.id)
        (entry,) = audit.list_entries(tx, tenant.id, action="run.metrics_changed")
    assert stored is not None
    assert stored.metrics == {
        HOSTILE_NAME: {"role": "eval", "direction": "minimize"},
        "reward": {"role": "proxy", "direction": "maximize"},
        "kl": {"role": "entropy", "direction": "maximize"},
    }
    entropy = after.partition('name="entropy"')[2].partition("</select>")[0]
    assert '<option value="kl" selected>' in entropy
    assert stored.raw_maximum is not None
    assert entry.actor == f"key {tenant.key.name}"


def test_only_admins_correct_roles_where_two_people_decide(address: str, database: Database, tenant: Tenant) -> None:
    """In a project with `second_person` an operator has no form for roles, and one sent all the same is refused."""
    run = tenant.open_run(metrics=None, recognise=True)
    tenant.post_observations(run, [PostedObservation("eval_gsm8k_loss", 0, 1.0)])
    with database.transaction() as tx:
        scopes = ("read", "operate")
        key, _ = keys.create_key(tx, project_id=tenant.id, name="ben", scopes=scopes, now=tenant.now)
    with open_client(address) as operator:
        sign_in_by_link(operator, key)
        assert "Correct roles" in operator.get(f"/runs/{run.id}").text
        tenant.change_settings(second_person=True)
        page = operator.get(f"/runs/{run.id}").text
        assert ("Correct roles" in page, "Confirm the roles" in page) == (False, False)
        assert "an admin confirms roles" in page
        form = {"eval": "eval_gsm8k_loss", "csrf": read_csrf_token(operator)}
        answer = operator.post(f"/runs/{run.id}/metrics", data=form)
    assert (answer.status_code, "only admins" in answer.text) == (403, True)
    with database.reading() as tx:
        assert audit.list_entries(tx, tenant.id, action="run.metrics_changed") == []


def test_invalid_roles_change_nothing(visitor: httpx.Client, tenant: Tenant) -> None:
    """One metric for two roles, or a form without a token, is refused and changes nothing."""
    run = open_run_with_unknown_eval(tenant)
    duplicate = {"eval": "reward", "proxy": "reward", "csrf": read_csrf_token(visitor)}
    assert visitor.post(f"/runs/{run.id}/metrics", data=duplicate).status_code == 422
    assert visitor.post(f"/runs/{run.id}/metrics", data={"eval": "reward"}).status_code == 403
    stored = tenant.load_run(run)
    assert "reward" in stored.metrics
    assert stored.metrics["reward"]["role"] == "proxy"


def test_guessed_direction_is_confirmed_by_a_button(visitor: httpx.Client, tenant: Tenant) -> None:
    """A metric with a guessed direction stops nothing; the button declares what the page shows."""
    run = tenant.open_run(metrics=None, recognise=True)
    points = [PostedObservation("eval_gsm8k_loss", step, 1 - step / 10) for step in range(5)]
    tenant.post_observations(run, points)
    before = visitor.get(f"/runs/{run.id}").text
    assert "Direction guessed: confirm to let it stop" in before
    hidden_fields = re.findall(
        r'<input type="hidden" name="((?:eval|proxy|kl|loss)(?:_lower)?)" value="([^"]*)">', before
    )
    assert dict(hidden_fields) == {"eval": "eval_gsm8k_loss", "eval_lower": "true"}
    visitor.post(f"/runs/{run.id}/metrics", data=dict(hidden_fields) | {"csrf": read_csrf_token(visitor)})
    after = visitor.get(f"/runs/{run.id}").text
    assert "Direction guessed" not in after
    stored = tenant.load_run(run)
    assert stored.recognition is not None
    assert stored.metrics == {"eval_gsm8k_loss": {"role": "eval", "direction": "minimize"}}
    assert stored.recognition.origins == {"eval_gsm8k_loss": "declared"}


def test_guessed_eval_sets_are_confirmed_together(visitor: httpx.Client, tenant: Tenant) -> None:
    """The button declares each of several evals of one name, which stay several."""
    run = tenant.open_run(metrics=None, recognise=True)
    metrics = {"eval_de_loss", "eval_en_loss"}
    points = [PostedObservation(metric, step, 1 - step / 10) for step in range(5) for metric in metrics]
    tenant.post_observations(run, points)
    page = visitor.get(f"/runs/{run.id}").text
    fields = re.findall(r'<input type="hidden" name="(eval(?:_lower)?)" value="([^"]*)">', page)
    evals = [value for name, value in fields if name == "eval"]
    body = {"eval": evals, "eval_lower": ["true", "true"], "csrf": read_csrf_token(visitor)}
    assert set(evals) == metrics
    visitor.post(f"/runs/{run.id}/metrics", data=body)
    stored = tenant.load_run(run)
    assert stored.metrics == {metric: {"role": "eval", "direction": "minimize"} for metric in metrics}

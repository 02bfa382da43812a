"""Roles on the page of a run: where they come from, what is missing, and a person's word about them."""

from __future__ import annotations

import re
from datetime import datetime

import httpx
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Observations, open_run
from evalstop_service.store import audit, mlflow_runs, runs
from evalstop_service.store.database import Database
from evalstop_service.store.mlflow_runs import MlflowRun
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant
from tests.service.web.dashboard.serving import token_of

HOSTILE = '<script>alert("x")</script>'


def recognised(database: Database, tenant: Tenant, now: datetime) -> Run:
    """A run that logs a proxy, and an eval under a name that nobody knows."""
    request = open_run.OpenRequest("roles", recognise=True)
    run, _ = open_run.open_run(database, tenant.project.id, request, now)
    points = [PostedObservation(metric, step, step / 10) for step in range(5) for metric in ("reward", "kl", HOSTILE)]
    submit_message(database, tenant.project.id, run.id, Observations(tuple(points)), now)
    return run


def test_corrected_on_its_page(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """The page says where roles come from and that the eval is missing; what is chosen there counts from then on."""
    run = recognised(database, tenant, utc_now())
    before = visitor.get(f"/runs/{run.id}").text
    assert "No metric is the eval score" in before
    assert "from its name" in before or "preset" in before
    form = {"eval": HOSTILE, "proxy": "reward", "eval_lower": "true", "csrf": token_of(visitor)}
    answer = visitor.post(f"/runs/{run.id}/metrics", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run.id}")
    after = visitor.get(f"/runs/{run.id}").text
    assert "No metric is the eval score" not in after
    assert "set by a person" in after
    assert HOSTILE not in after
    with database.reading() as tx:
        found = runs.find_run(tx, tenant.project.id, run.id)
        (entry,) = audit.list_entries(tx, tenant.project.id, action="run.metrics_changed")
    assert found is not None
    assert found.metrics == {
        HOSTILE: {"role": "eval", "direction": "minimize"},
        "reward": {"role": "proxy", "direction": "maximize"},
    }
    assert found.raw_maximum is not None
    assert entry.actor == f"key {tenant.key.name}"


def test_blanks_are_part_of_a_name(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """A metric that was logged with blanks around its name is chosen by just that name."""
    run = recognised(database, tenant, utc_now())
    submit_message(database, tenant.project.id, run.id, Observations((PostedObservation(" mine ", 0, 0.5),)), utc_now())
    visitor.post(f"/runs/{run.id}/metrics", data={"eval": " mine ", "csrf": token_of(visitor)})
    with database.reading() as tx:
        found = runs.find_run(tx, tenant.project.id, run.id)
    assert found is not None
    assert list(found.metrics) == [" mine "]


def test_params_are_folded(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """The params of a run, of which a trainer may log hundreds, stand behind a fold, the other labels before it."""
    request = open_run.OpenRequest("params", labels={"gpus": "8"})
    run, _ = open_run.open_run(database, tenant.project.id, request, utc_now())
    with database.transaction() as tx:
        mlflow_runs.add_mlflow_run(tx, MlflowRun(run.id, params={"lr": HOSTILE, "width": "12"}))
    shown = visitor.get(f"/runs/{run.id}").text
    before, folded = shown.split("Params (2)")
    assert "<bdi>gpus</bdi>" in before
    assert "<bdi>width</bdi>" in folded
    assert HOSTILE not in shown


def test_bad_choices(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """One metric for two roles, a form of another site, or a run of nobody's, changes nothing."""
    run = recognised(database, tenant, utc_now())
    twice = {"eval": "reward", "proxy": "reward", "csrf": token_of(visitor)}
    assert visitor.post(f"/runs/{run.id}/metrics", data=twice).status_code in (400, 404, 422)
    assert visitor.post(f"/runs/{run.id}/metrics", data={"eval": "reward"}).status_code == 403
    with database.reading() as tx:
        found = runs.find_run(tx, tenant.project.id, run.id)
    assert found is not None
    assert "reward" in found.metrics
    assert found.metrics["reward"]["role"] == "proxy"


def test_a_guess_is_confirmed_by_a_button(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """The page says that a guessed metric stops nothing, and the button declares what the page shows."""
    run, _ = open_run.open_run(database, tenant.project.id, open_run.OpenRequest("guess", recognise=True), utc_now())
    points = [PostedObservation("eval_gsm8k_loss", step, 1 - step / 10) for step in range(5)]
    submit_message(database, tenant.project.id, run.id, Observations(tuple(points)), utc_now())
    before = visitor.get(f"/runs/{run.id}").text
    assert "Direction guessed: confirm to let it stop" in before
    hidden = re.findall(r'<input type="hidden" name="((?:eval|proxy|kl|loss)(?:_lower)?)" value="([^"]*)">', before)
    assert dict(hidden) == {"eval": "eval_gsm8k_loss", "eval_lower": "true"}
    visitor.post(f"/runs/{run.id}/metrics", data=dict(hidden) | {"csrf": token_of(visitor)})
    after = visitor.get(f"/runs/{run.id}").text
    assert "Direction guessed" not in after
    with database.reading() as tx:
        found = runs.find_run(tx, tenant.project.id, run.id)
    assert found is not None
    assert found.recognition is not None
    assert found.metrics == {"eval_gsm8k_loss": {"role": "eval", "direction": "minimize"}}
    assert found.recognition.origins == {"eval_gsm8k_loss": "declared"}

"""Open pages ask whether what they show has changed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import httpx
import pytest
from evalstop_service.decisions import commands
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store import keys
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database

from tests.service.web.pages.recorded_groups import populate_groups
from tests.service.web.pages.recorded_runs import Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY

EVALS = load_recorded_evals("np-0044")


def read_revision(client: httpx.Client, path: str) -> str:
    return client.get(path).text.split('data-revision="')[1].split('"')[0]


def ask_for_newer(client: httpx.Client, path: str, seen: str) -> httpx.Response:
    return client.get(path, headers={"X-Seen-Revision": seen}, follow_redirects=False)


def test_page_of_a_run_is_sent_again_after_each_change(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A verdict, an outcome, a report and an end each change the page; before them the answer is 204, without it."""
    run = tenant.open_run("ppo", mode="enforce")
    tenant.post_evals(run, EVALS[:27])
    path = f"/runs/{run.id}"
    seen = read_revision(visitor, path)
    decision = tenant.post_evals(run, EVALS[27:28]).decision
    assert decision is not None
    changes: list[Callable[[], object]] = [
        lambda: commands.label_decision(
            database,
            tenant.id,
            decision.id,
            Outcome(outcome=DecisionOutcome.RIGHT, turn_step=None, note="", actor="ada", at=now),
        ),
        lambda: commands.record_report(
            database, tenant.id, decision.id, Reported(now, DecisionState.FAILED, "receiver", "no", {})
        ),
        lambda: commands.finish_run(database, tenant.id, run.id, "failed", now),
    ]
    for change in changes:
        assert ask_for_newer(visitor, path, seen).status_code == 200
        seen = read_revision(visitor, path)
        unchanged = ask_for_newer(visitor, path, seen)
        assert (unchanged.status_code, unchanged.content) == (204, b"")
        change()
    assert ask_for_newer(visitor, path, seen).status_code == 200


def test_list_is_sent_again_for_matching_runs_only(visitor: httpx.Client, tenant: Tenant) -> None:
    """A new run changes a list whose filter it matches, and no other."""
    every, others = read_revision(visitor, "/runs"), read_revision(visitor, "/runs?name=other")
    tenant.open_run("one")
    assert ask_for_newer(visitor, "/runs", every).status_code == 200
    assert ask_for_newer(visitor, "/runs?name=other", others).status_code == 204
    tenant.open_run("other")
    assert ask_for_newer(visitor, "/runs?name=other", others).status_code == 200


@SQLITE_ONLY
@pytest.mark.parametrize("path", ["/", "/precision", "/runs/fleet", "/groups/population"])
def test_other_pages_are_not_sent_again_unchanged(visitor: httpx.Client, tenant: Tenant, path: str) -> None:
    """The overview, precision, the fleet and groups say so too when nothing has changed."""
    populate_groups(tenant)
    # Asked again, because the fleet is renewed every ten seconds, and the list of a group when its health is saved.
    asked = (ask_for_newer(visitor, path, read_revision(visitor, path)).status_code for _ in range(5))
    assert 204 in asked
    assert ask_for_newer(visitor, path, "older").status_code == 200


@SQLITE_ONLY
def test_open_page_of_a_revoked_key_leads_to_the_sign_in(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A page whose key is revoked is redirected, so that its script loads it anew."""
    seen = read_revision(visitor, "/runs")
    with database.transaction() as tx:
        keys.revoke_key(tx, tenant.id, tenant.key.id, now)
    answer = ask_for_newer(visitor, "/runs", seen)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/runs")

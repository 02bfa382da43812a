"""The GPU-hours that stops saved, and would have saved: the same figures on every page, in the API and in the shell."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import httpx
import pytest
from evalstop_client.cli import main
from evalstop_service.decisions import commands
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store.runs import Run

from tests.service.web.pages.recorded_runs import LEVEL_POLICY, Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, get_html

HACKING = load_recorded_evals("np-0044")
WORDS = ("saved", "would_have_saved")


def read_hours(html: str) -> dict[str, list[int]]:
    """The figures of each of the two words, in the order of the page."""
    return {
        word: [round(float(text)) for text in re.findall(rf'data-hours="{word}">([\d.]+)<', html)] for word in WORDS
    }


def read_rows(html: str, *names: str) -> dict[str, dict[str, list[int]]]:
    """The figures in the table row of each of these."""
    rows = {name: row for row in re.findall(r"<tr.*?</tr>", html, re.S) for name in names if f">{name}</" in row}
    return {name: read_hours(row) for name, row in rows.items()}


def expect_hours(saved: int | None, would_have_saved: int | None) -> dict[str, list[int]]:
    return {
        word: [] if hours is None else [hours] for word, hours in zip(WORDS, (saved, would_have_saved), strict=True)
    }


def open_decided_run(tenant: Tenant, policy: str, mode: str) -> Run:
    """A run on 8 GPUs that was opened three hours ago, and whose policy called for a stop an hour later."""
    labels, opened_at = {"gpus": "8"}, tenant.now - timedelta(hours=3)
    run = tenant.open_run(policy, opened_at, policy=policy, mode=mode, labels=labels, total_steps=4 * HACKING[-1].step)
    tenant.post_evals(run, HACKING, opened_at + timedelta(hours=1))
    decision = tenant.load_decision(run)
    if mode == "enforce":
        tenant.confirm_stop(decision)
    else:
        tenant.finish_run(run)
    label = commands.Label(DecisionOutcome.RIGHT, None, "", "dana", tenant.now)
    commands.label_decision(tenant.database, tenant.id, decision.id, label)
    return run


@pytest.mark.slow
@SQLITE_ONLY
def test_hours_saved_are_the_same_everywhere(
    visitor: httpx.Client,
    tenant: Tenant,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What an enforced policy saved, and what one in shadow would have saved, stands alike wherever it is shown."""
    tenant.add_policy(LEVEL_POLICY | {"name": "candidate"})
    enforced = open_decided_run(tenant, "level", "enforce")
    shadow = open_decided_run(tenant, "candidate", "shadow")

    def read_api(path: str) -> Any:
        answer = visitor.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {tenant.secret}"})
        return answer.raise_for_status().json()

    whole = read_api("/precision")["groups"][0]["gpu_hours"]
    saved, would_have_saved = (round(whole[word]) for word in WORDS)
    assert would_have_saved == 16, "two hours on 8 GPUs"
    assert saved > 16
    assert read_hours(get_html(visitor, "/").split('data-part="saved"')[1]) == expect_hours(saved, would_have_saved)

    of_policies = {"level": expect_hours(saved, 0), "candidate": expect_hours(0, would_have_saved)}
    groups = read_api("/precision?group_by=policy")["groups"]
    by_api = {
        group["policy"]["name"]: expect_hours(*(round(group["gpu_hours"][word]) for word in WORDS)) for group in groups
    }
    assert by_api == of_policies
    assert read_rows(get_html(visitor, "/policies"), *of_policies) == of_policies
    precision = get_html(visitor, "/precision")
    assert read_rows(precision.split('data-part="policies"')[1].split("</section>")[0], *of_policies) == of_policies
    assert read_hours(precision.split('data-part="cost"')[1]) == of_policies["level"], "it opens with what is enforced"
    other = get_html(visitor, "/precision?policy=candidate%401")
    assert read_hours(other.split('data-part="cost"')[1]) == of_policies["candidate"]

    of_runs = {enforced.id: expect_hours(saved, None), shadow.id: expect_hours(None, would_have_saved)}
    for run in (enforced, shadow):
        assert read_hours(get_html(visitor, f"/runs/{run.id}")) == of_runs[run.id]
        attempt = read_api(f"/runs/{run.id}/outcomes")["case"]
        words = (attempt[f"gpu_hours_{word}"] for word in WORDS)
        assert expect_hours(*(hours and round(hours) for hours in words)) == of_runs[run.id]
    names = {"level": of_runs[enforced.id], "candidate": of_runs[shadow.id]}
    assert read_rows(get_html(visitor, "/cases"), *names) == names

    monkeypatch.setenv("EVALSTOP_URL", address)
    monkeypatch.setenv("EVALSTOP_KEY", tenant.secret)
    assert main(["precision"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[-2:] == ["gpu_hours_saved", "gpu_hours_would_have_saved"]
    shown = {row.split("@")[0]: [round(float(text)) for text in row.split()[-2:]] for row in printed[1:]}
    assert shown == {"level": [saved, 0], "candidate": [0, would_have_saved]}

"""Requests for an extra evaluation, on the run's page."""

from __future__ import annotations

import httpx
from evalstop_service.ingest import CheckpointSaved, EvalAnswered
from evalstop_service.runs.watched_metrics import PAIRED_METRIC
from evalstop_service.store.observations import PostedObservation

from tests.service.web.pages.recorded_runs import Tenant


def test_page_shows_eval_request_and_answer(visitor: httpx.Client, tenant: Tenant) -> None:
    """The page shows the step, checkpoint and probability of a request, then the answer."""
    run = tenant.open_run(metrics=None, policy="early", total_steps=90, eval_share=0.0)
    assert "Requested evaluations" not in visitor.get(f"/runs/{run.id}").text
    tenant.submit(run, CheckpointSaved(30, "file:///30"))
    request = None
    for step in range(60):
        value = min(step, 30.0) - 0.3 * max(0, step - 30) + 4.0 * ((step * step * 7) % 11) / 11
        request = request or tenant.post_observations(run, [PostedObservation("eval", step, value)]).eval_request
    assert request is not None
    assert request.probability is not None
    page = visitor.get(f"/runs/{run.id}").text
    assert f"step {request.step} against the best, step 30" in page
    assert f"{100 * request.probability:.1f}" in page
    assert "No answer yet" in page
    point = PostedObservation(PAIRED_METRIC, request.step, -2.5, 0.25)
    tenant.submit(run, EvalAnswered(request.id, 1, point, 800, "<i>key</i>"))
    page = visitor.get(f"/runs/{run.id}").text
    assert "No answer yet" not in page
    assert "on 800 prompts" in page
    assert "answers to requested evaluations" in page
    assert "not watched" not in page
    assert "&lt;i&gt;key" in page

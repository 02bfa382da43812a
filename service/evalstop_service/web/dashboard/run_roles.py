"""The form that corrects the metric roles of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response

from evalstop_service.errors import Invalid
from evalstop_service.ingest import Message, RolesCorrected
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Operator, SiteOf

router = APIRouter(route_class=PageRoute)

MOST_CHOICES = 500

Metric = Annotated[str, Form(max_length=256)]
LowerIsBetter = Annotated[bool, Form()]


@router.post("/runs/{run_id}/metrics")
def correct_roles(
    run_id: UUID,
    site: SiteOf,
    visitor: Operator,
    eval_metric: Annotated[str, Form(alias="eval", max_length=256)] = "",
    proxy: Metric = "",
    kl: Metric = "",
    loss: Metric = "",
    eval_lower: LowerIsBetter = False,
    proxy_lower: LowerIsBetter = False,
) -> Response:
    """Set the roles of all metrics of a run. The run is judged again from its first observation."""
    roles = [("eval", eval_metric, eval_lower), ("proxy", proxy, proxy_lower), ("kl", kl, True), ("loss", loss, True)]
    metrics: dict[str, MetricFields] = {}
    for role, metric, lower in roles:
        name = forms.remove_control_characters(metric)  # not stripped: spaces are part of a logged name
        if name in metrics:
            raise Invalid(f"{name!r} is chosen for two roles; a metric has one role")
        if name:
            metrics[name] = {"role": role, "direction": "minimize" if lower else "maximize"}
    with site.database.reading() as tx:
        visitor.load_run(tx, run_id)
    site.context.committer.submit_and_wait(Message(visitor.project.id, run_id, RolesCorrected(metrics, visitor.actor)))
    return forms.redirect_back(run_id, "")


def metric_choices(run: Run, metrics: Iterable[str]) -> list[str]:
    """The metrics to choose from: those that were logged, and those with a role but no value yet."""
    return sorted({*metrics, *run.metrics})[:MOST_CHOICES]

"""Which metric plays which role for a run: shown on its page, and corrected there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response

from evalstop_service.errors import Invalid
from evalstop_service.ingest import Arrival, Corrected
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Operating, SiteOf

router = APIRouter(route_class=PageRoute)

MOST_CHOICES = 500

Metric = Annotated[str, Form(max_length=256)]
Lower = Annotated[bool, Form()]


@router.post("/runs/{run_id}/metrics")
def correct(
    run_id: UUID,
    site: SiteOf,
    visitor: Operating,
    gold: Metric = "",
    proxy: Metric = "",
    kl: Metric = "",
    loss: Metric = "",
    gold_lower: Lower = False,
    proxy_lower: Lower = False,
) -> Response:
    """Say which metrics play which role: these and no others. The run is judged anew."""
    said = [("eval", gold, gold_lower), ("proxy", proxy, proxy_lower), ("kl", kl, True), ("loss", loss, True)]
    metrics: dict[str, dict[str, str]] = {}
    for role, metric, lower in said:
        name = forms.printable(metric)  # as it was logged: blanks around it are part of it
        if name in metrics:
            raise Invalid(f"{name!r} was chosen for two roles; a metric plays one")
        if name:
            metrics[name] = {"role": role, "direction": "minimize" if lower else "maximize"}
    with site.database.reading() as tx:
        visitor.run(tx, run_id)
    site.doors.take(Arrival(visitor.project.id, run_id, Corrected(metrics, visitor.actor)))
    return forms.back(run_id, "")


def choices(run: Run, metrics: Iterable[str]) -> list[str]:
    """The names to choose from: what the run has logged, and what plays a role without having come yet."""
    return sorted({*metrics, *run.metrics})[:MOST_CHOICES]

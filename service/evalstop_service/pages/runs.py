"""The page of all runs."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response

from evalstop_service import vitals, watching
from evalstop_service.liveness import Pulse
from evalstop_service.pages import sparkline, words
from evalstop_service.pages.answers import PageRoute, page
from evalstop_service.pages.sparkline import Sparkline
from evalstop_service.pages.visitor import SignedIn, SiteOf, known
from evalstop_service.store import decisions, observations, pulses, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

router = APIRouter(route_class=PageRoute)

PAGE = 50
STATUSES = ("running", "stopped", "completed", "failed", "lost")

Status = Literal["", "running", "stopped", "completed", "failed", "lost"]

_TRAINER = """\
from evalstop_client import Run

with Run(url="URL", key="esk_...", name="my-first-run") as run:
    for step in range(total_steps):
        reward, kl = train_one_step()
        run.log({"proxy": reward, "kl": kl}, step=step)
        if step % 20 == 0:
            run.log({"eval": evaluate()}, step=step)
            run.checkpoint(save_model(step), step=step)
        if run.should_stop:
            break"""


@dataclass(frozen=True)
class Row:
    """A run as the list shows it."""

    run: Run
    decision: Decision | None
    gold: Sparkline | None
    pulse: Pulse
    dead: list[dict[str, str]]


@router.get("/runs")
def show_runs(
    request: Request, site: SiteOf, visitor: SignedIn, name: str = "", status: Status = "", cursor: UUID | None = None
) -> Response:
    """The newest runs first, searched by name and filtered by status."""
    wanted = _filters(name, status, cursor)
    with site.database.reading() as tx:
        # Read first: what follows may be newer, never older.
        revision = runs.listing_revision(tx, visitor.project.id, limit=PAGE, **wanted)
        found = runs.listing(tx, visitor.project.id, limit=PAGE + 1, **wanted)
        rows = _rows(tx, found[:PAGE], visitor.project.stale_seconds, site.clock())
    return page(
        "runs.html",
        visitor=visitor,
        rows=rows,
        states=words.STATES,
        name=wanted["name"] or "",
        status=status,
        statuses={choice: _link(name=name, status=choice) for choice in ("", *STATUSES)},
        filtered=bool(name or status or cursor),
        next_page=_link(name=name, status=status, cursor=str(rows[-1].run.id)) if len(found) > PAGE else None,
        first_page=_link(name=name, status=status) if cursor else None,
        events=_link("/runs/events", name=name, status=status, cursor=str(cursor or "")),
        revision=revision,
        snippet=_TRAINER.replace("URL", f"{request.url.scheme}://{request.url.netloc}"),
    )


@router.get("/runs/events")
def follow_runs(
    request: Request,
    site: SiteOf,
    visitor: SignedIn,
    name: str = "",
    status: Status = "",
    cursor: Annotated[UUID | Literal[""], Query()] = "",
    since: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Tell whenever what the list shows has changed."""
    wanted = _filters(name, status, cursor or None)

    def poll() -> str | None:
        with site.database.reading() as tx:
            if known(tx, site, request) is None:
                return None
            return runs.listing_revision(tx, visitor.project.id, limit=PAGE, **wanted)

    return site.streams.answer(last_event_id or since, poll)


def _rows(tx: Transaction, found: list[Run], stale_seconds: float, now: datetime) -> list[Row]:
    decided = decisions.of_runs(tx, [run.id for run in found])
    gold = {run.id: metric for run in found if (metric := watching.eval_metric(run)) is not None}
    stored = pulses.of_runs(tx, [run.id for run in found])
    outlines = observations.outlines(tx, gold, sparkline.STRETCHES)
    return [
        Row(
            run,
            decision := decided.get(run.id),
            sparkline.draw(outlines.get(run.id, ()), run.best_checkpoint, decision.step if decision else None),
            vitals.pulse_of(run, pulse := stored.get(run.id), stale_seconds, now),
            pulse.dead if pulse and run.status == "running" else [],
        )
        for run in found
    ]


def _filters(name: str, status: str, cursor: UUID | None) -> dict[str, Any]:
    # PostgreSQL holds no NUL, and no name holds any control character.
    plain = "".join(character for character in name if unicodedata.category(character) not in ("Cc", "Cs")).strip()
    return {"name": plain or None, "status": status or None, "before": cursor}


def _link(path: str = "/runs", **parameters: str) -> str:
    query = urlencode({name: value for name, value in parameters.items() if value})
    return f"{path}?{query}" if query else path

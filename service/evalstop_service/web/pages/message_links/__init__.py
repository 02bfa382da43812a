"""The page of a link in a message to people: why a run is to be stopped, and buttons to veto the stop or have it wait.

Nobody needs to sign in. Reading the page changes nothing, so that previews of links and scanners of mail stop nothing.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import message_links
from evalstop_service.decisions.message_links import Choice
from evalstop_service.errors import Invalid, require
from evalstop_service.web.pages import charts, formatting, forms
from evalstop_service.web.pages.responses import PageRoute, render_page
from evalstop_service.web.pages.visitor import SiteOf

router = APIRouter(prefix="/act/{delivery_id}/{token}", route_class=PageRoute)


@router.get("")
def show_link(delivery_id: UUID, token: str, site: SiteOf) -> Response:
    """What the run is, why it is to be stopped and when, or what became of the stop."""
    now = site.clock()
    with site.database.reading() as tx:
        link = require(message_links.open_link(tx, site.context.encryption, delivery_id, token, now), "such link")
        curves = charts.load_curves(tx, link.run) if link.choices else []
    response = render_page(
        "message_link.html",
        visitor=None,
        path=f"/act/{delivery_id}/{token}",
        run=link.run,
        decision=link.decision,
        choices=link.choices,
        curves=curves,
        reason=link.decision.verdict.reason_in_words,
        summary=formatting.describe_run(link.run, link.decision, now),
    )
    response.headers["X-Robots-Tag"] = "noindex"
    return response


@router.post("/veto")
def veto_stop(delivery_id: UUID, token: str, site: SiteOf, name: Annotated[str, Form(max_length=256)] = "") -> Response:
    """Veto the stop."""
    return _act(site, delivery_id, token, Choice.VETO, name)


@router.post("/wait")
def postpone_stop(
    delivery_id: UUID,
    token: str,
    site: SiteOf,
    until: Annotated[Choice, Form()],
    name: Annotated[str, Form(max_length=256)] = "",
) -> Response:
    """Have the stop wait."""
    if until is Choice.VETO:
        raise Invalid("a stop waits until `hour` or `morning`")
    return _act(site, delivery_id, token, until, name)


def _act(site: SiteOf, delivery_id: UUID, token: str, choice: Choice, name: str) -> Response:
    name = " ".join(forms.clean_text(name).split())
    acted = message_links.act(site.database, site.context.encryption, delivery_id, token, choice, name, site.clock())
    require(acted, "such link")
    return RedirectResponse(f"/act/{delivery_id}/{token}", 303)

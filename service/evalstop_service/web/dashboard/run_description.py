"""The form that changes the description of a run: owner, group, tags and notes."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response

from evalstop_service.projects.project_settings import parse_form, parse_names
from evalstop_service.rules.run_descriptions import DescriptionIn
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Operator, SiteOf

router = APIRouter(route_class=PageRoute)

Text = Annotated[str, Form()]


@router.post("/runs/{run_id}/description")
def describe(
    run_id: UUID, site: SiteOf, visitor: Operator, owner: Text = "", group: Text = "", tags: Text = "", notes: Text = ""
) -> Response:
    """Change the description of a run; empty fields are removed. Tags are separated by commas."""
    fields = {
        "owner": forms.clean_text(owner) or None,
        "group": forms.clean_text(group) or None,
        "tags": parse_names(forms.remove_control_characters(tags)),
        "notes": notes.replace("\r\n", "\n").strip(),
    }
    describe_run(site.database, visitor.author(site.clock()), run_id, parse_form(DescriptionIn, fields))
    return forms.redirect_back(run_id, "")

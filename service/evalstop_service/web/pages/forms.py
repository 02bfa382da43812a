"""Fields of forms: text, reasons, steps, and the redirect after a form."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import urlsplit
from uuid import UUID

from fastapi.responses import RedirectResponse

from evalstop_service.domain.fields import remove_controls
from evalstop_service.errors import Invalid
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.web.pages.sign_in import safe_path

LONGEST_LINE = 1000

QUEUE = "/#queue"
"""Where proposals wait for a second person: the page after a form that only proposed something."""


def clean_text(text: str) -> str:
    """The text without control characters and surrounding blanks."""
    return remove_controls(text).strip()


def parse_reason(text: str) -> str:
    """The reason of an action; raises Invalid when it is empty."""
    reason = parse_note(text)
    if not reason:
        raise Invalid("enter a reason; it is recorded with the decision")
    return reason


def parse_note(text: str) -> str:
    """One line of text, which may be empty."""
    return clean_text(text)[:LONGEST_LINE]


def parse_step(text: str) -> int | None:
    """A step; None when the field is empty. Raises Invalid."""
    digits = "".join(text.split())
    if not digits:
        return None
    if not (digits.isascii() and digits.isdigit()) or int(digits) > MAX_STEP:
        raise Invalid(
            f"{clean_text(text)[:40]!r} is not a step: enter a whole number from 0 on, or leave the field empty"
        )
    return int(digits)


def select_cases(policy: str, job_kind: str, since: datetime | None = None) -> CaseFilter:
    """The cases of NAME or NAME@VERSION, and of a job kind; an empty text selects all."""
    name, _, version = remove_controls(policy).partition("@")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None
    kind = remove_controls(job_kind) or None
    return CaseFilter(policy=name or None, version=number, job_kind=kind, since=since)


def redirect_back(run_id: UUID, target: str) -> RedirectResponse:
    """Redirect to the page of the form, by default the run's."""
    path = safe_path(target) if target else f"/runs/{run_id}"
    return RedirectResponse(urlsplit(path)._replace(fragment="").geturl() or "/", 303)

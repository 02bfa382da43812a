"""What comes in by forms: one line of plain text, a step, a way back."""

from __future__ import annotations

import unicodedata
from urllib.parse import urlsplit
from uuid import UUID

from fastapi.responses import RedirectResponse

from evalstop_service.errors import Invalid
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.web.dashboard.sign_in import local_path

LONGEST_LINE = 1000


def printable(text: str) -> str:
    """The text without control characters, which no name holds and PostgreSQL refuses in part."""
    return "".join(character for character in text if unicodedata.category(character) not in ("Cc", "Cs"))


def plain(text: str) -> str:
    """The same without blanks around it."""
    return printable(text).strip()


def reason(text: str) -> str:
    """Why somebody does something; raises Invalid where nothing is said."""
    said = plain(text)[:LONGEST_LINE]
    if not said:
        raise Invalid("say why: others will read it beside the decision")
    return said


def note(text: str) -> str:
    """A remark, which may be empty."""
    return plain(text)[:LONGEST_LINE]


def step(text: str) -> int | None:
    """A step, None where the field was left empty; raises Invalid for what is none."""
    digits = "".join(text.split())
    if not digits:
        return None
    if not (digits.isascii() and digits.isdigit()) or int(digits) > MAX_STEP:
        raise Invalid(f"{plain(text)[:40]!r} is no step: a whole number from 0 on, or nothing at all")
    return int(digits)


def back(run_id: UUID, target: str) -> RedirectResponse:
    """To where the form stood, else to the run."""
    path = local_path(target) if target else f"/runs/{run_id}"
    return RedirectResponse(urlsplit(path)._replace(fragment="").geturl() or "/", 303)

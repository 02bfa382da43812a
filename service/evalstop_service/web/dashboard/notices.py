"""Notices about the last action on the next page, with an undo button if possible."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response

from evalstop_service.web.dashboard.cookies import delete_cookie, read_cookie, set_cookie

_COOKIE = "evalstop_notice"
_SECONDS = 60


@dataclass(frozen=True)
class Notice:
    """A sentence or two; `undo`: the form that undoes the action, None if that is not possible."""

    text: str
    undo: str | None = None


_NOTICES = {
    "vetoed": Notice(
        "Vetoed: nothing is sent, and the run continues. A veto cannot be undone; to stop the run, use Stop now."
    ),
    "released": Notice(
        "Released: the stop is carried out despite its guards. Veto it in its veto window, or undo it after that."
    ),
    "stopped": Notice(
        "Receivers are asked to stop the job. Undo the stop takes that back: the job goes on where its scheduler can."
    ),
    "proposed": Notice("Proposed: nothing happens until a second person confirms it."),
    "undone": Notice(
        "Undone: receivers are asked to let the job go on, where its scheduler can. To stop it again, use Stop now."
    ),
    "labeled": Notice("Label saved. It stays on record; a new label takes its place."),
    "paused": Notice("Stopping is paused.", "/settings/resume"),
    "resumed": Notice("Stops are resumed. Those sent before you pause again are not recalled.", "/settings/pause"),
}


def find_notice(name: str) -> Notice | None:
    """The notice of this name; None for any other."""
    return _NOTICES.get(name)


def add_notice(response: Response, request: Request, name: str) -> Response:
    """Show a notice on the next page that the browser opens."""
    assert name in _NOTICES
    set_cookie(response, request, _COOKIE, name, _SECONDS)
    return response


def read_notice(request: Request) -> str:
    """The name of the notice for a page that the browser opens; requests of scripts have none."""
    opens = request.method == "GET" and request.headers.get("sec-fetch-mode", "navigate") == "navigate"
    return read_cookie(request, _COOKIE) if opens else ""


def clear_notice(response: Response, request: Request) -> None:
    """Delete the cookie, so that the notice is shown only once."""
    if response.status_code == 200 and read_notice(request):
        delete_cookie(response, request, _COOKIE)

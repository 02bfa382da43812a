"""How pages answer: templates, the headers that keep them safe, and errors as pages of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evalstop_service.errors import Conflict, Invalid, NotFound, ServiceError
from evalstop_service.security.address_policy import AddressRefused
from evalstop_service.web.dashboard import formatting, static_files

_log = logging.getLogger(__name__)

# Plotly makes one empty <style> element and adds rules to it by insertRule, which the policy does not govern: the hash
# is that of the empty text. Its other style element carries rules for maps and is kept out by an element with its id.
_EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' {_EMPTY_STYLE}",
            "img-src 'self' data:",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class SignInNeeded(ServiceError):
    """Sign in first."""


class MayNot(ServiceError):
    """The visitor's role is too little for this; the message says which one it takes."""


class StrangeForm(ServiceError):
    """The form does not come from a page of this session. Load the page again, and send it from there."""


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = static_files.url
    environment.filters.update(
        step=formatting.step,
        number=formatting.number,
        exact=formatting.exact,
        pair=formatting.pair,
        moment=formatting.moment,
        iso=formatting.iso,
    )
    environment.filters.update(percent=formatting.percent, amount=formatting.amount)
    return environment


TEMPLATES = _templates()


def page(template: str, status_code: int = 200, **values: Any) -> HTMLResponse:
    """A rendered template; every value in it is escaped."""
    return HTMLResponse(TEMPLATES.get_template(template).render(values), status_code)


class PageRoute(APIRoute):
    """A route whose every answer carries the headers, and whose errors are pages; other routes keep their own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:
                response = _error(request, error)
            for name, value in HEADERS.items():
                response.headers[name] = value
            response.headers.setdefault("Cache-Control", "no-store")
            return response

        return handle_page


def _error(request: Request, error: Exception) -> Response:
    match error:
        case SignInNeeded():
            if request.method != "GET":  # what was sent is not sent again
                return RedirectResponse("/login", 303)
            asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?next={quote(asked, safe='/')}", 303)
        case MayNot():
            return _told(403, "Not yours to do", str(error))
        case StrangeForm():
            return _told(403, "Nothing was changed", str(error))
        case Conflict():
            return _told(409, "Nothing was changed", _sentence(error))
        case Invalid():
            return _told(422, "Nothing was changed", _sentence(error))
        case AddressRefused():
            return _told(422, "Nothing was changed", _sentence(error))
        case RequestValidationError() if request.method != "GET" and _about_the_form(error):
            return _told(422, "Nothing was changed", "The form was not whole. Load the page again, and send it anew.")
        case NotFound() | RequestValidationError():
            return _told(404, "Not found", "Your key sees nothing here; it may belong to another project.")
        case sa.exc.OperationalError() | sa.exc.TimeoutError():
            _log.error("the database does not answer: %s", error)
            return _told(503, "The database does not answer", "Load the page again in a moment.")
        case _:
            _log.error("a page failed", exc_info=error)
            return _told(500, "The service failed", "This is a fault of the service; its log says more.")


def _about_the_form(error: RequestValidationError) -> bool:
    return all(item["loc"][0] == "body" for item in error.errors())


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _told(status: int, title: str, detail: str) -> HTMLResponse:
    return page("error.html", status, visitor=None, title=title, detail=detail)

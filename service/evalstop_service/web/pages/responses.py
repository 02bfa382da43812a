"""Responses of pages: templates, security headers, and error pages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import msgspec
from evalstop_detectors.wording import format_count
from fastapi import Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException

from evalstop_service.domain.times import format_duration
from evalstop_service.errors import NotFound, ServiceError
from evalstop_service.web.limits import to_coroutine
from evalstop_service.web.pages import formatting, static_files
from evalstop_service.web.problems import count_refusal, describe_fault, problem_of

PERIODS = {"": "all time", "7": "7 days", "30": "30 days", "90": "90 days", "365": "a year"}
"""The available periods of figures: values of the parameter, and their names."""

Days = Annotated[Literal["", "7", "30", "90", "365"], Query()]
"""The period of a page's figures; empty: all time."""


def find_beginning(days: str, now: datetime) -> datetime | None:
    """The beginning of a period, to the hour, so that repeated rendering gives the same links; None: all time."""
    return (now - timedelta(days=int(days))).replace(minute=0, second=0, microsecond=0) if days else None


# Plotly adds one empty <style> element and fills it by insertRule, which the policy does not restrict: this is the hash
# of the empty string. Its other style element has rules for maps; an element with its id in parts.html prevents it.
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
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class SignInRequired(ServiceError):
    """Sign in first."""


class SignInOutdated(ServiceError):
    """Sign in again: a change like this needs a recent sign-in. The message is the path."""


class Forbidden(ServiceError):
    """The visitor's role does not allow this; the message says which role does."""


def _create_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder for folder in Path(__file__).parent.iterdir() if folder.is_dir()]),
        autoescape=True,
        auto_reload=False,  # every page would look for changes of each of its templates
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = static_files.asset_url
    environment.globals["periods"] = PERIODS
    environment.globals["help_is_built"] = static_files.is_built
    environment.globals["summarize_help"] = static_files.summarize_help
    environment.filters.update(
        step=formatting.format_step,
        number=formatting.format_number,
        percent=formatting.format_percent,
        amount=formatting.format_amount,
        counted=format_count,
        duration=format_duration,
        time=formatting.format_time,
        iso=formatting.format_iso,
    )
    return environment


TEMPLATES = _create_environment()


def render_page(template: str, status_code: int = 200, **values: Any) -> HTMLResponse:
    """A rendered template; every value is escaped."""
    return HTMLResponse(TEMPLATES.get_template(template).render(values), status_code)


def send_json(document: Any) -> Response:
    """Data for a script; values that are not finite become null."""
    return Response(msgspec.json.encode(document), media_type="application/json")


def make_link(path: str, query: Mapping[str, object]) -> str:
    """The address with the nonempty parameters."""
    text = urlencode({name: value for name, value in query.items() if value not in (None, "")}, doseq=True)
    return f"{path}?{text}" if text else path


class PageRoute(APIRoute):
    """A route whose responses carry the security headers and whose errors are pages."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, to_coroutine(endpoint), **{**options, "include_in_schema": False})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:
                response = _answer_error(request, error)
            for name, value in HEADERS.items():
                response.headers[name] = value
            return response

        return handle_page


def _answer_error(request: Request, error: Exception) -> Response:
    nothing = "Nothing to show" if request.method == "GET" else "Nothing was changed"
    match error:
        case SignInRequired():
            if request.method != "GET":  # the form is not sent again after signing in
                return RedirectResponse("/login", 303)
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?next={quote(target, safe='/')}", 303)
        case SignInOutdated():  # to the page of the form
            page = "/".join(str(error).split("/")[:2])
            return RedirectResponse(f"/login?{urlencode({'next': page, 'again': '1'})}", 303)
        case Forbidden():
            return _render_error(403, nothing, str(error))
        case HTTPException():  # FastAPI's, of a form that cannot be read
            return _render_error(error.status_code, nothing, _to_sentence(error.detail))
        case RequestValidationError() if all(item["loc"][0] != "path" for item in error.errors()):
            advice = "" if request.method == "GET" else " Go back to correct this."
            return _render_error(422, nothing, _name_faults(error) + advice)
        case NotFound() | RequestValidationError():
            return _render_error(404, "Not found", "Nothing here for your key. It may belong to another project.")
    count_refusal(request, error)
    problem = problem_of(error)  # writes the log
    title = problem.title if problem.status >= 500 else nothing
    return _render_error(problem.status, title, _to_sentence(problem.detail))


def _name_faults(error: RequestValidationError) -> str:
    """A sentence for each field that is wrong, a few at most: its name, and what is wrong with it."""
    return " ".join(_to_sentence(f"{_field_name(item['loc'])}: {describe_fault(item)}") for item in error.errors()[:3])


def _field_name(location: Sequence[int | str]) -> str:
    return next((str(part)[:80] for part in location[1:] if isinstance(part, str)), "the form").replace("_", " ")


def _to_sentence(error: object) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _render_error(status: int, title: str, detail: str) -> HTMLResponse:
    return render_page("error.html", status, visitor=None, title=title, detail=detail)

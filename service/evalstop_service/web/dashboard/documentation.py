"""Serves the documentation at /help, as built by `make docs`: static files, which also work offline."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[2] / "help"

_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def install(app: FastAPI) -> None:
    """Add /help to an app, if the documentation was built."""
    if is_built():
        app.add_api_route("/help", redirect_to_start, include_in_schema=False)
        app.mount("/help", _Pages())


def redirect_to_start() -> Response:
    """Redirect to /help/, to which the links of the first page are relative."""
    return RedirectResponse("/help/")


def is_built() -> bool:
    """Whether the documentation was built."""
    return (FOLDER / "index.html").is_file()


class _Pages(StaticFiles):
    """The pages may run only the scripts that were built with them."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER, html=True)
        self._headers = {
            "Content-Security-Policy": _build_policy(),
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with the headers of pages."""
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response


def _build_policy() -> str:
    scripts = {script for page in FOLDER.rglob("*.html") for script in _INLINE_SCRIPT.findall(page.read_bytes())}
    digests = sorted(base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts)
    allowed = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )

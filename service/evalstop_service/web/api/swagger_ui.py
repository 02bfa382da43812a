"""The API reference at /docs: Swagger UI with local files, without a CDN."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

FILES = "/docs-files"


def install(app: FastAPI) -> None:
    """Add /docs to an app."""
    app.mount(FILES, StaticFiles(packages=[("fastapi_offline", "static")]))
    page = get_swagger_ui_html(
        openapi_url=str(app.openapi_url),
        title=f"{app.title} API",
        swagger_js_url=f"{FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{FILES}/swagger-ui.css",
        swagger_favicon_url=f"{FILES}/favicon.png",
    )

    # Swagger UI sets inline styles, and one inline script starts it.
    script = re.search(r"<script>(.*?)</script>", bytes(page.body).decode(), re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return page

"""The API reference at /docs: Swagger UI with local files, without a CDN."""

from __future__ import annotations

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

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return page

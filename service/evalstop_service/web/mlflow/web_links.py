"""Redirects the links that MLflow clients print, `.../mlflow/#/experiments/ID/runs/ID`, to EvalStop's pages.

Browsers do not send the part after `#`, so a script in an otherwise empty page redirects.
"""

from __future__ import annotations

import base64
import hashlib

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

_SCRIPT = """
const run = /\\/runs\\/([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})/.exec(location.hash);
location.replace(new URL(run ? "../runs/" + run.slice(1).join("-") : "../runs", location.href));
"""

_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>EvalStop</title><script>{_SCRIPT}</script></head>
<body><p>The runs are <a href="../runs">here</a>.</p></body></html>
"""

_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_DIGEST}'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/", include_in_schema=False)
def open_link() -> HTMLResponse:
    """A page that redirects to the run in the link."""
    return HTMLResponse(_PAGE, headers=_HEADERS)

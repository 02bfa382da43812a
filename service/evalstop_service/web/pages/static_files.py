"""Static files: the style sheet, the scripts, Plotly's JavaScript from its Python package, and at /help the
documentation, as built by `make docs`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
import sys
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from evalstop_service.errors import NotFound

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

router = APIRouter(include_in_schema=False)

_PLOTLY = metadata.distribution("plotly").locate_file("plotly/package_data/plotly.min.js")
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_OWN = {path.name: path for path in Path(__file__).parent.rglob("*") if path.suffix in _TYPES}
_FILES = _OWN | {"plotly.min.js": Path(str(_PLOTLY))}

_COMPRESS = {"zstd": partial(zstd.compress, level=12), "gzip": partial(gzip.compress, compresslevel=6, mtime=0)}
"""The encodings, best first. Browsers accept zstd over HTTPS; level 18 takes 1.5 s for 7 % more."""


def asset_url(name: str) -> str:
    """The URL of a file; it changes with the content."""
    return f"/assets/{_digest(name)}/{name}"


@router.get("/assets/{digest}/{name}")
def get_asset(digest: str, name: str, request: Request) -> Response:
    """A file; cacheable forever when requested by its current digest."""
    if name not in _FILES:
        raise NotFound
    encoding = next((one for one in _COMPRESS if one in request.headers.get("accept-encoding", "")), "")
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if digest == _digest(name) else "no-store",
        "Vary": "Accept-Encoding",
        **({"Content-Encoding": encoding} if encoding else {}),
    }
    return Response(_encode(name, encoding), media_type=_TYPES[Path(name).suffix], headers=headers)


@cache
def _digest(name: str) -> str:
    # All files except Plotly share one digest, so that relative imports between scripts resolve.
    names = sorted(_OWN) if name in _OWN else [name]
    return hashlib.sha256(b"".join(_FILES[file].read_bytes() for file in names)).hexdigest()[:16]


@cache
def _encode(name: str, encoding: str) -> bytes:
    body = _FILES[name].read_bytes()
    return _COMPRESS[encoding](body) if encoding else body


FOLDER = Path(__file__).parents[2] / "help"
SEARCH_INDEX = FOLDER / "search/search_index.json"
"""Written last, so that a documentation that is being built is not shown."""

_TAG = re.compile(r"<[^>]*>")
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def install(app: FastAPI) -> None:
    """Add /help to an app, if the documentation was built."""
    if is_built():
        app.add_api_route("/help", redirect_to_start, include_in_schema=False)
        app.mount("/help", _Pages())


def redirect_to_start() -> Response:
    """Redirect to /help/: the links of the first page are relative to it."""
    return RedirectResponse("/help/")


def is_built() -> bool:
    """Whether the documentation was built."""
    return SEARCH_INDEX.is_file()


_PARAGRAPH = re.compile(r"\s*<p>(.*?)</p>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.?])\s+(?=[A-Z`])")


@cache
def summarize_help(place: str) -> str:
    """The first two sentences at a place of the documentation, such as "roles/#presets"."""
    entries = msgspec.json.decode(SEARCH_INDEX.read_bytes())["docs"]
    paragraphs = next((_PARAGRAPH.findall(entry["text"]) for entry in entries if entry["location"] == place), [])
    sentences = [part for text in paragraphs for part in _SENTENCE_END.split(html.unescape(_TAG.sub("", text)))]
    return " ".join(sentences[:2])


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

"""Static files: the style sheet, the scripts, and Plotly's JavaScript from its Python package."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from fastapi import APIRouter, Request, Response

from evalstop_service.errors import NotFound

router = APIRouter()

_STATIC = Path(__file__).parent / "static"
_PLOTLY = "plotly/package_data/plotly.min.js"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_OWN = frozenset(path.name for path in _STATIC.iterdir() if path.suffix in _TYPES)
_NAMES = _OWN | {"plotly.min.js"}


@dataclass(frozen=True)
class _Asset:
    digest: str
    body: bytes
    gzipped: bytes


def asset_url(name: str) -> str:
    """The URL of a file; it changes with the content."""
    return f"/assets/{_digest(name)}/{name}"


@router.get("/assets/{digest}/{name}")
def get_asset(digest: str, name: str, request: Request) -> Response:
    """A file; cacheable forever when requested by its current digest."""
    if name not in _NAMES:
        raise NotFound
    asset = _load_asset(name)
    gzipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if digest == asset.digest else "no-store",
        "Vary": "Accept-Encoding",
        **({"Content-Encoding": "gzip"} if gzipped else {}),
    }
    return Response(asset.gzipped if gzipped else asset.body, media_type=_TYPES[Path(name).suffix], headers=headers)


def _read_content(name: str) -> bytes:
    if name == "plotly.min.js":
        return Path(str(metadata.distribution("plotly").locate_file(_PLOTLY))).read_bytes()
    return (_STATIC / name).read_bytes()


@cache
def _digest(name: str) -> str:
    # All files except Plotly share one digest, so that relative imports between scripts resolve.
    names = sorted(_OWN) if name in _OWN else [name]
    return hashlib.sha256(b"".join(_read_content(file) for file in names)).hexdigest()[:16]


@cache
def _load_asset(name: str) -> _Asset:
    body = _read_content(name)
    return _Asset(_digest(name), body, gzip.compress(body, 6, mtime=0))

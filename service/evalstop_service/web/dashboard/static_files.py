"""The files that pages load: our own style and scripts, and Plotly's JavaScript out of its Python package."""

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
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_OWN = frozenset(path.name for path in _STATIC.iterdir() if path.suffix in _TYPES)
_NAMES = _OWN | {"plotly.min.js"}


@dataclass(frozen=True)
class _Asset:
    digest: str
    body: bytes
    gzipped: bytes


def url(name: str) -> str:
    """Where a file is served; another address as soon as its content is another."""
    return f"/assets/{_digest(name)}/{name}"


@router.get("/assets/{digest}/{name}")
def get_asset(digest: str, name: str, request: Request) -> Response:
    """A file, to be kept for good by whoever asked by its digest."""
    if name not in _NAMES:
        raise NotFound
    asset = _asset(name)
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if digest == asset.digest else "no-store",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        **({"Content-Encoding": "gzip"} if zipped else {}),
    }
    return Response(asset.gzipped if zipped else asset.body, media_type=_TYPES[Path(name).suffix], headers=headers)


def _content(name: str) -> bytes:
    if name == "plotly.min.js":
        return Path(str(metadata.distribution("plotly").locate_file(_PLOTLY))).read_bytes()
    return (_STATIC / name).read_bytes()


@cache
def _digest(name: str) -> str:
    # Our own files have one digest, so that a script finds those that it imports beside itself.
    together = sorted(_OWN) if name in _OWN else [name]
    return hashlib.sha256(b"".join(_content(one) for one in together)).hexdigest()[:16]


@cache
def _asset(name: str) -> _Asset:
    body = _content(name)
    return _Asset(_digest(name), body, gzip.compress(body, 6, mtime=0))

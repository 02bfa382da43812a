"""The log: a line a record, as text for people or JSON for machines, with the request it belongs to and no secret."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]

CONTEXT_FIELDS = ("request_id", "run_id", "project_id", "delivery_id")
"""What a line says of what it is about, where that is known."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""An id that a caller may choose: it comes back in a header and in logs, so that it must not carry anything else."""

_SECRETS = re.compile(
    r"""(?P<key>\besk_)[\w-]+
    | (?P<webhook>\bwhsec_)[\w+/=-]+
    | (?P<link>[?&]token=)[^\s&"'\\]+
    | (?P<cookie>\bevalstop_session=)[^\s;"'\\]+
    | (?P<bearer>\bBearer[ ])[^\s"'\\]+
    | (?P<user>://[^\s:/@"'\\]*:)[^\s/"'\\]+(?=@)
    | (?P<conninfo>\bpassword=)[^\s&"'\\]+""",
    re.VERBOSE | re.IGNORECASE,
)
"""Keys, webhook secrets, sign-in links, sessions, passwords in URLs: whoever lets one into a message, it ends here."""

_MARKS = ("esk_", "whsec_", "token=", "session=", "bearer ", "://", "password=")

_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {9: "\t", 10: "\\n"}

_about: ContextVar[dict[str, Any] | None] = ContextVar("evalstop_about", default=None)


def configure_logging(level: str, form: Format = "text", stream: TextIO | None = None) -> None:
    """Send every record of this process, ours and those of the libraries, to `stream` (standard error).

    Called again, it takes the place of what it set up before; handlers of others stay.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [*(other for other in root.handlers if not isinstance(other.formatter, TextFormatter)), handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    # Statements with their parameters, rows with what they hold, requests with all that stands in their addresses: not
    # even at DEBUG.
    for name in ("sqlalchemy", "alembic", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def log_context(**facts: object) -> Iterator[None]:
    """Within the block every line tells these facts: `with logs.log_context(run_id=..., delivery_id=...)`."""
    token = _about.set({**(_about.get() or {}), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def add_log_context(**facts: object) -> None:
    """Add facts to the request or block that is under way; they are seen in the threads that work for it, too."""
    told = _about.get()
    if told is not None:
        told.update(facts)


def begin_request(wanted_id: str | None) -> tuple[str, Token[dict[str, Any] | None]]:
    """Begin a request under the id that the caller wants, if it is fit to be one, or a new one; gives the id, and what
    `end_request` wants back."""
    taken = wanted_id if wanted_id and REQUEST_ID.fullmatch(wanted_id) else f"{random.getrandbits(64):016x}"
    return taken, _about.set({"request_id": taken})


def end_request(token: Token[dict[str, Any] | None]) -> None:
    """End a request that was begun in this task."""
    _about.reset(token)


def request_id() -> str | None:
    """The id of the request that is under way."""
    return (_about.get() or {}).get("request_id")


def find_context(record: logging.LogRecord) -> dict[str, str]:
    """What is known of the record: from `extra=` of the call that made it, else from what is under way."""
    told: Mapping[str, Any] = _about.get() or {}
    found = {name: getattr(record, name, told.get(name)) for name in CONTEXT_FIELDS}
    return {name: str(value) for name, value in found.items() if value is not None}


def mask_secrets(text: str) -> str:
    """The text with `***` for everything that would let somebody in."""
    lowered = text.lower()
    if not any(mark in lowered for mark in _MARKS):  # nearly always, and twenty times as fast
        return text
    return _SECRETS.sub(lambda match: f"{match[match.lastgroup or 0]}***", text)


class TextFormatter(logging.Formatter):
    """`2026-01-01T12:00:00.123Z INFO evalstop_service.app: started ... [run_id=...]`, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in find_context(record).items())
        message = record.getMessage().translate(_CONTROLS)  # a line that a caller forged would be a line of ours
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{f' [{facts[1:]}]' if facts else ''}"
        return mask_secrets("\n".join(part for part in (line, self._trace(record)) if part))

    def _trace(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])


class JsonFormatter(TextFormatter):
    """One JSON object a line: time, level, logger, message, the facts that are known, exception."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **find_context(record),
            **getattr(record, "fields", {}),
        }
        if trace := self._trace(record):
            document["exception"] = trace
        return json.dumps({name: _clean(value) for name, value in document.items()}, default=str)


def _clean(value: object) -> object:
    return mask_secrets(value) if isinstance(value, str) else value


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

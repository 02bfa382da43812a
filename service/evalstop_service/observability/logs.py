"""Logging: one line per record, as text or JSON, with the request it belongs to and with secrets masked."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]

CONTEXT_FIELDS = ("request_id", "run_id", "project_id", "delivery_id")
"""Context that a line shows if it is known."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
"""A request id that a caller may choose. It appears in a response header and in logs, so other characters are
refused."""

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
"""Masks keys, webhook secrets, sign-in links, sessions and passwords in URLs, whichever message contains them."""

_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {9: "\t", 10: "\\n"}

_about: ContextVar[dict[str, Any] | None] = ContextVar("evalstop_about", default=None)


def configure_logging(level: str, form: Format, stream: TextIO | None = None) -> None:
    """Send every record of this process, including those of libraries, to `stream` (default standard error).

    Calling it again replaces its own handler; other handlers stay.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [*(other for other in root.handlers if not isinstance(other.formatter, TextFormatter)), handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    # SQL statements with parameters, rows with their values, requests with full URLs: never logged, not even at DEBUG.
    for name in ("sqlalchemy", "alembic", "httpcore2", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def log_context(**facts: object) -> Iterator[None]:
    """Add fields to every line logged within the block: `with logs.log_context(run_id=..., delivery_id=...)`."""
    token = _about.set({**(_about.get() or {}), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def add_log_context(**facts: object) -> None:
    """Add fields to the current request or block, including the threads that work for it."""
    context = _about.get()
    if context is not None:
        context.update(facts)


def choose_request_id(wanted: str | None) -> str:
    """The id of a request: the caller's if it is valid, else a new one."""
    return wanted if wanted and REQUEST_ID.fullmatch(wanted) else f"{random.getrandbits(64):016x}"


def request_id() -> str | None:
    """The id of the current request."""
    return (_about.get() or {}).get("request_id")


def find_context(record: logging.LogRecord) -> dict[str, str]:
    """The context of a record: from `extra=` of the logging call, else from the current request or block."""
    current: Mapping[str, Any] = _about.get() or {}
    context = {name: getattr(record, name, current.get(name)) for name in CONTEXT_FIELDS}
    return {name: str(value) for name, value in context.items() if value is not None}


def mask_secrets(text: str) -> str:
    """Replace credentials in the text by `***`."""
    return _SECRETS.sub(lambda match: f"{match[match.lastgroup or 0]}***", text)


class TextFormatter(logging.Formatter):
    """`2026-01-01T12:00:00.123Z INFO evalstop_service.app: started ... [run_id=...]`, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in find_context(record).items())
        message = record.getMessage().translate(_CONTROLS)  # prevents log injection
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{f' [{facts[1:]}]' if facts else ''}"
        return mask_secrets(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


class JsonFormatter(TextFormatter):
    """One JSON object per line: time, level, logger, message, the known context, exception."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **find_context(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: mask_secrets(text) for name, text in document.items()})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

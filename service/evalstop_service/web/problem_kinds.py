"""The kinds of problems in responses: a stable code, and what to do about it. Pure."""

from __future__ import annotations

from enum import Enum

PATH = "/problems"
"""Path of the page that explains them."""

_SMALLER = "Send it in smaller parts. Nothing was stored."
_JSON = "Send JSON with the header `Content-Type: application/json`, compressed only where `detail` names encodings."
_AGAIN = "Send it again after `Retry-After` seconds; what was stored is not counted twice."


class ProblemKind(Enum):
    """A kind of problem: its title and what to do about it. Programs rely on its `code`, which never changes."""

    INVALID_REQUEST = (
        "The request is not valid",
        "`errors` names each fault by a JSON pointer or a parameter, or `detail` the only one. Nothing was stored.",
    )
    INVALID_JSON = ("The body is not valid JSON", "`detail` says where parsing or decompressing failed.")
    NOT_JSON = ("The body is not JSON", _JSON)
    BODY_TOO_LARGE = ("The body is too large", _SMALLER)
    NO_KEY = (
        "No valid key",
        "Send `Authorization: Bearer esk_...` with a valid key; `evalstop key create` creates one.",
    )
    SCOPE_MISSING = ("The key may not do this", "Use a key with the scope, or of the kind, that `detail` names.")
    NOT_FOUND = ("Not found", "Nothing in the key's project has this id, or there is no such path: see `/docs`.")
    WRONG_METHOD = ("Wrong method", "`Allow` names the methods of this path.")
    CONFLICT = (
        "Conflict with what is recorded",
        "`detail` names both; the recorded value stands. Leave out what differs.",
    )
    OTHER_PROJECT = (
        "The run belongs to another project",
        "`key_hash` is that of a key of another project: open the run with a key of that project.",
    )
    TOO_MANY_REQUESTS = ("Too many requests", _AGAIN)
    QUOTA_REACHED = (
        "A quota of the project is reached",
        "`detail` names the quota. With 429, send it again after `Retry-After` seconds; with 409, remove something or "
        "have the quota raised.",
    )
    OVERLOADED = ("The service is overloaded", _AGAIN)
    DATABASE_AWAY = ("The database cannot be used now", _AGAIN)
    DATABASE_REFUSES = (
        "The database refuses this",
        "Free space on its disk, or grant the service's role what the log names; then send it again.",
    )
    SCHEMA_TOO_OLD = (
        "The schema is missing or too old",
        "Run `evalstop migrate`. If nothing was missing, this is a bug: look for the `request_id` in the log.",
    )
    UNREADABLE_SECRET = ("A secret cannot be read", "Set `EVALSTOP_SECRET_KEYS` to the keys that encrypted it.")
    FAULT = ("The service failed", "This is a bug: look for the `request_id` in the log.")
    OTHER = ("Other", "See `title` and `detail`.")  # refused by the web server itself

    def __init__(self, title: str, advice: str) -> None:
        self.title = title
        self.advice = advice

    @property
    def code(self) -> str:
        """The stable name for programs."""
        return self.name.lower()

    @property
    def uri(self) -> str:
        """The URI of its explanation: the `type` of RFC 9457."""
        return f"{PATH}#{self.code}"

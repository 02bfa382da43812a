"""The kinds of problems that the service answers with: a stable code, and what to do about it. Pure."""

from __future__ import annotations

import html
from dataclasses import dataclass

PATH = "/problems"
"""Of the page that explains them."""


@dataclass(frozen=True)
class ProblemKind:
    """A kind of problem. Programs go by `code`, which never changes; `advice`: what to do about it."""

    code: str
    title: str
    advice: str

    @property
    def uri(self) -> str:
        """What explains it: the `type` of RFC 9457."""
        return f"{PATH}#{self.code}"


_SMALLER = "Send it in smaller parts. Nothing was stored."
_JSON = "Send JSON with the header `Content-Type: application/json`."
_AGAIN = "Send the same again after the seconds that `Retry-After` names; what was stored already counts once."

PROBLEM_KINDS = (
    ProblemKind(
        "invalid_request",
        "The request is not valid",
        "`errors` says what is wrong where, by a JSON pointer or the name of a parameter. Nothing was stored.",
    ),
    ProblemKind("invalid_policy", "The policy is not valid", "`detail` names the part of the document."),
    ProblemKind(
        "address_refused",
        "Webhooks may not go there",
        "Public addresses are allowed, and those that `EVALSTOP_WEBHOOK_NETWORKS` names.",
    ),
    ProblemKind("invalid_json", "The body is not JSON that can be read", "`detail` says where it breaks off."),
    ProblemKind("not_json", "The body is not JSON", _JSON),
    ProblemKind("compressed_body", "The body is compressed", "Send it without `Content-Encoding`."),
    ProblemKind("not_json_lines", "The body is not lines of JSON", "`detail` names the type to send it as."),
    ProblemKind("unknown_encoding", "The body is packed in an unknown way", "`Accept-Encoding` names those known."),
    ProblemKind("unreadable_encoding", "The body cannot be unpacked", "Pack it anew and send the rest."),
    ProblemKind("not_a_scrape", "The body is no scrape", "`detail` names the types to send it as."),
    ProblemKind("unreadable_text", "The body is no text that can be read", "Send UTF-8."),
    ProblemKind("body_too_large", "The body is too large", _SMALLER),
    ProblemKind("scrape_too_large", "The scrape is too large", _SMALLER),
    ProblemKind("body_too_slow", "The body takes too long", "`lines_stored` says where to go on."),
    ProblemKind("body_broke_off", "The body broke off", "`lines_stored` says where to go on."),
    ProblemKind(
        "no_key",
        "No valid key",
        "Send `Authorization: Bearer esk_...` with a key that is in use; `evalstop key create` makes one.",
    ),
    ProblemKind("scope_missing", "The key may not do this", "Use a key with the scope that `detail` names."),
    ProblemKind("key_without_project", "The key is bound to no project", "Use a key of the project."),
    ProblemKind(
        "key_of_one_project",
        "The key is bound to one project",
        "Use a key to the installation: `evalstop admin key create --installation`.",
    ),
    ProblemKind(
        "not_found",
        "Not found",
        "There is no such thing in the key's project, or nothing at this path: `/docs` shows what there is.",
    ),
    ProblemKind("moved", "Moved", "Use the path in `Location`, without the slash at its end."),
    ProblemKind("wrong_method", "Wrong method", "`Allow` names the methods of this path."),
    ProblemKind(
        "conflict",
        "Conflict with what is on record",
        "`detail` names both; what is on record stands. Leave out what differs, or say it of something else.",
    ),
    ProblemKind("too_many_bodies", "Too many of your bodies arrive at one time", "Send fewer at a time."),
    ProblemKind("too_many_requests", "Too many requests", _AGAIN),
    ProblemKind("too_many_receivers", "Too many receivers are waiting", _AGAIN),
    ProblemKind("overloaded", "The service cannot take more just now", _AGAIN),
    ProblemKind("database_away", "The database does not answer", _AGAIN),
    ProblemKind("disk_full", "The database's disk is full", "Make room for the database, and send the same again."),
    ProblemKind("schema_too_old", "The schema is too old", "Run `evalstop migrate`."),
    ProblemKind("service_too_old", "The service is older than its database", "Run the newest release."),
    ProblemKind(
        "unreadable_secret", "A secret cannot be read", "Set `EVALSTOP_SECRET_KEYS` to the keys that sealed it."
    ),
    ProblemKind("fault", "The service failed", "It is a fault of ours: the log says more under the `request_id`."),
)

OTHER = ProblemKind("other", "Other", "`title` and `detail` say what it is.")
"""What the web server refuses by itself."""

KINDS_BY_TITLE = {kind.title: kind for kind in PROBLEM_KINDS}


def render_page() -> str:
    """All kinds as a page."""
    items = "".join(
        f'<dt id="{kind.code}"><code>{kind.code}</code>: {html.escape(kind.title)}</dt><dd>{_as_html(kind.advice)}</dd>'
        for kind in (*PROBLEM_KINDS, OTHER)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Problems · EvalStop</title></head>'
        f"<body><h1>Problems</h1><p>What <code>code</code> in an answer means.</p><dl>{items}</dl></body></html>"
    )


def _as_html(text: str) -> str:
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))

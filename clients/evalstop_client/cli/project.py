"""`evalstop project`, `endpoint` and `key`: the settings, webhook endpoints and keys of a project."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import islice

from evalstop_client.cli.command import (
    FAILED,
    OK,
    Subcommands,
    add_command,
    add_group,
    add_limit,
    connect,
    parse_count,
    show_facts,
    show_list,
    show_result,
)
from evalstop_client.errors import NotFound
from evalstop_client.reading.api import is_id, parse_moment
from evalstop_client.service import Json
from evalstop_client.settings import parse_pairs

LISTS = {"allowed_policies": "any", "panel": "shipped", "rules": "none"}
"""The settings that are lists, and the word for null; `none` is an empty one."""
WORDS = {"none": None, "yes": True, "no": False}


def add_project(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "project", text)
    add_command(verbs, "show", show_project)
    setting = add_command(verbs, "set", set_project)
    setting.add_argument(
        "settings",
        nargs="+",
        metavar="SETTING=VALUE",
        help="such as max_mode=enforce; `none` for no value; commas between several; any policies, the shipped panel",
    )


def add_pause(commands: Subcommands, text: str) -> None:
    pausing = add_command(commands, "pause", pause_project)
    pausing.add_argument("--reason", default="", help="shown with each stop on hold")
    pausing.add_argument(
        "--until", metavar="TIME", type=_parse_end, help="when it resumes by itself: 4h, 2d, or a time (default: never)"
    )


def add_resume(commands: Subcommands, text: str) -> None:
    add_command(commands, "resume", resume_project)


def show_project(options: argparse.Namespace) -> int:
    """Show the settings of the project."""
    return _show_settings(options, connect(options).connection.get("/project"))


def set_project(options: argparse.Namespace) -> int:
    """Change settings of the project; requires the scope admin."""
    changes = {name: parse_setting(name, text) for name, text in parse_pairs(options.settings, "setting")}
    changed = connect(options).connection.patch("/project", changes)
    return _show_settings(options, changed if options.json else {name: changed[name] for name in changes})


def pause_project(options: argparse.Namespace) -> int:
    """Pause all stops in the project until it is resumed; requires the scope operate."""
    body = {"reason": options.reason, "until": options.until}
    project = connect(options).connection.post("/project/pause", body)
    until = f" until {project['paused_until']}" if project["paused_until"] is not None else ""
    already = f" (it was paused already, since {project['paused_at']}; the later end holds)"
    state = f"paused by {project['paused_by']}{until}: nothing is stopped{already * project['already_paused']}"
    return show_result(options, project, f"project {project['name']} is {state}")


def resume_project(options: argparse.Namespace) -> int:
    """Resume stops in a paused project."""
    project = connect(options).connection.post("/project/resume")
    return show_result(options, project, f"project {project['name']} is resumed")


def parse_setting(name: str, text: str) -> object:
    """Parse a setting into a value for the API.

    >>> [parse_setting("stops_per_hour", text) for text in ("20", "none")], parse_setting("max_mode", "enforce")
    ([20, None], 'enforce')
    >>> [parse_setting("allowed_policies", text) for text in ("early", "none", "any")]
    [['early'], [], None]
    """
    if name in LISTS:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [] if text == "none" else None if text == LISTS[name] else parts
    if text in WORDS:
        return WORDS[text]
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _show_settings(options: argparse.Namespace, settings: Json) -> int:
    words = {name: LISTS.get(name, "none") for name, value in settings.items() if value is None}
    empty = {name: "none" for name, value in settings.items() if value == []}
    return show_facts(options, settings, settings | words | empty)


def _parse_end(text: str) -> str:
    """A time with its zone, by default this machine's, or a duration, as it is."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        return text


PULL = "pull:"
"""Prefix of the names of pull endpoints in lists."""


def add_endpoint(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "endpoint", text)
    add_command(verbs, "ls", list_endpoints)
    adding = add_command(verbs, "add", create_endpoint)
    adding.add_argument(
        "address",
        metavar="URL",
        help="URL of the receiver, such as https://receiver.example:9000/; pull:NAME if it fetches its events",
    )
    adding.add_argument(
        "--event", action="append", metavar="TYPE", help="types of events to send; * for all that require no action"
    )
    adding.add_argument(
        "--preset",
        metavar="NAME",
        help="the types for receiver, parking_receiver, owner or team (default: what suits URL and format)",
    )
    adding.add_argument("--format", default="standard", help="slack, teams or email: messages for people")
    listing = add_command(verbs, "deliveries", list_deliveries)
    listing.add_argument("--state", choices=("waiting", "delivered", "dead", "cancelled"), help="only in this state")
    listing.add_argument("--since", help="only of events since then: 15m, 12h, 30d, or a time")
    add_limit(listing)
    for name, run in (("test", send_test), ("rotate", rotate_secret), ("rm", remove_endpoint)):
        add_command(verbs, name, run, "endpoint")


def list_endpoints(options: argparse.Namespace) -> int:
    """List the endpoints of the project."""
    items = connect(options).connection.get("/endpoints")["items"]
    return show_list(options, items, "id url event_types enabled failures")


def create_endpoint(options: argparse.Namespace) -> int:
    """Add an endpoint and print its signing secret, which cannot be shown again."""
    connection, events = connect(options).connection, {"event_types": options.event, "preset": options.preset}
    if options.address.startswith(PULL):
        made = connection.post("/pull/endpoints", {"name": options.address.removeprefix(PULL), **events})
    else:
        made = connection.post("/endpoints", {"url": options.address, "format": options.format, **events})
    signs = options.format == "standard"
    return show_result(options, made, made["secret"] if signs else f"endpoint {made['url']} was added")


def send_test(options: argparse.Namespace) -> int:
    """Send a signed test event to an endpoint, by its id or URL, and print its answer."""
    tested = connect(options).connection.post(f"{_find_endpoint(options)}/test")
    facts = ("url", "delivered", "status_code", "error", "answer")
    show_facts(options, tested, {name: tested[name] for name in facts})
    return OK if tested["delivered"] else FAILED


def rotate_secret(options: argparse.Namespace) -> int:
    """Give an endpoint a new signing secret and print it; the previous one stays valid for a day."""
    rotated = connect(options).connection.post(f"{_find_endpoint(options)}/rotate-secret")
    return show_result(options, rotated, rotated["secret"])


def list_deliveries(options: argparse.Namespace) -> int:
    """List what was sent to the endpoints, or waits, newest first."""
    query = {"state": options.state, "since": parse_moment(options.since)}
    items = list(islice(connect(options).connection.pages("/deliveries", query), options.limit))
    return show_list(options, items, "created_at event_type url state attempts last_error")


def remove_endpoint(options: argparse.Namespace) -> int:
    """Remove an endpoint and cancel its waiting deliveries."""
    connect(options).connection.delete(_find_endpoint(options))
    return show_result(options, {}, f"endpoint {options.endpoint} was removed")


def _find_endpoint(options: argparse.Namespace) -> str:
    """The path of the endpoint in the options."""
    items = [] if is_id(options.endpoint) else connect(options).connection.get("/endpoints")["items"]
    return f"/endpoints/{_find_id(options.endpoint, items, 'url')}"


def _find_id(id_or_name: str, items: Iterable[Json], field: str) -> str:
    """The id, or that of the only item with this name. Raises NotFound."""
    if is_id(id_or_name):
        return id_or_name
    ids = [str(item["id"]) for item in items if item[field] == id_or_name]
    if len(ids) != 1:
        found = f"{len(ids)} of them have" if ids else "none of them has"
        raise NotFound(f"{found} the {field} {id_or_name!r}: give an id.")
    return ids[0]


SCOPES = ("ingest", "read", "report", "operate", "admin")

FIRST = "The first key is printed by `evalstop up`, or created on its machine by `evalstop admin key create`."


def add_key(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "key", f"{text} {FIRST}")
    add_command(verbs, "ls", list_keys)
    create = add_command(verbs, "create", create_key)
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["ingest"], help="what it may do (default ingest)"
    )
    create.add_argument("--expires-in-days", type=parse_count, metavar="DAYS", help="days until the key expires")
    create.add_argument(
        "--network", action="append", default=[], metavar="CIDR", help="network from which it is accepted (default any)"
    )
    create.add_argument(
        "--endpoint", action="append", default=[], metavar="ID", help="bind a key with the scope report to it"
    )
    add_command(verbs, "revoke", revoke_key, "key")


def list_keys(options: argparse.Namespace) -> int:
    """List the keys of the project, revoked ones included."""
    items = list(connect(options).connection.pages("/keys", {}))
    return show_list(options, items, "id name scopes last_used_at expires_at revoked_at")


def create_key(options: argparse.Namespace) -> int:
    """Create a key of the project and print it; it cannot be shown again."""
    days = options.expires_in_days
    body = {
        "name": options.name,
        "scopes": options.scopes,
        "expires_at": None if days is None else (datetime.now(UTC) + timedelta(days=days)).isoformat(),
        "networks": options.network,
        "endpoint_ids": options.endpoint,
    }
    made = connect(options).connection.post("/keys", body)
    return show_result(options, made, made["key"])


def revoke_key(options: argparse.Namespace) -> int:
    """Revoke a key, by its id, or by its name if that is unique among active keys."""
    connection = connect(options).connection
    active = (key for key in connection.pages("/keys", {}) if key["revoked_at"] is None)
    connection.delete(f"/keys/{_find_id(options.key, active, 'name')}")
    return show_result(options, {}, f"key {options.key} was revoked")

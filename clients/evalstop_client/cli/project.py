"""`evalstop project`, `endpoint` and `key`: the settings, webhook endpoints and keys of a project."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta
from itertools import islice

from evalstop_client.cli.command import (
    FAILED,
    OK,
    Shown,
    Subcommands,
    add_command,
    add_group,
    connect,
    parse_count,
    parse_time,
    print_facts,
    print_json,
    show_list,
    show_result,
)
from evalstop_client.errors import ConfigurationError, NotFound, Rejected
from evalstop_client.reading.api import Api, is_id, parse_moment
from evalstop_client.service import Json
from evalstop_client.settings import parse_pairs

LISTS = {"allowed_policies": "any", "panel": "shipped", "rules": "none"}
"""The settings that are lists, and the word for null; `none` is an empty one."""
WORDS = {"none": None, "yes": True, "no": False}
SET_ELSEWHERE = {
    "quotas": "by `PUT /api/v1/projects/{id}/quotas`, with a key to the installation",
    "paused_at": "by `evalstop pause` and `evalstop resume`",
}
"""How to change what `show` prints and `set` does not take."""


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


def add_digest(commands: Subcommands, text: str) -> None:
    add_command(commands, "digest", show_digest)


def show_digest(options: argparse.Namespace) -> int:
    """Show the digest of the last 7 days, as endpoints that subscribe to project.digest get it every Monday."""
    document = connect(options).connection.get("/project/digest")
    return show_result(options, document, document["mail"].rstrip())


def show_project(options: argparse.Namespace) -> int:
    """Show the settings of the project."""
    return _print_settings(connect(options).connection.get("/project"), options)


def set_project(options: argparse.Namespace) -> int:
    """Change settings of the project; requires the scope admin."""
    written = dict(parse_pairs(options.settings, "setting"))
    for name in written.keys() & SET_ELSEWHERE.keys():
        raise ConfigurationError(f"{name}: change it {SET_ELSEWHERE[name]}.")
    changes = {name: parse_setting(name, text) for name, text in written.items()}
    changed = connect(options).connection.patch("/project", changes)
    return _print_settings(changed if options.json else {name: changed[name] for name in changes}, options)


def pause_project(options: argparse.Namespace) -> int:
    """Pause all stops in the project until it is resumed; requires the scope operate."""
    body = {"reason": options.reason, "until": options.until}
    return _tell_pause(connect(options).connection.post("/project/pause", body), options)


def resume_project(options: argparse.Namespace) -> int:
    """Resume stops in a paused project."""
    return _tell_pause(connect(options).connection.post("/project/resume", {}), options)


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


def _print_settings(settings: Json, options: argparse.Namespace) -> int:
    if options.json:
        print_json(settings)
    else:
        print_facts((name, _format_setting(name, value)) for name, value in settings.items())
    return OK


def _tell_pause(project: Json, options: argparse.Namespace) -> int:
    state = "resumed"
    if project["paused_at"] is not None:
        until = f" until {project['paused_until']}" if project["paused_until"] is not None else ""
        state = f"paused by {project['paused_by']}{until}: nothing is stopped"
        if project["already_paused"]:
            state += f" (it was paused already, since {project['paused_at']}; the later end holds)"
    return show_result(options, project, f"project {project['name']} is {state}")


def _parse_end(text: str) -> str:
    """A time with its zone, by default this machine's, or a duration, as it is."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        return text


def _format_duration(seconds: float) -> Shown:
    """Whole seconds as people write them; the service reads these texts too.

    >>> [_format_duration(seconds) for seconds in (900.0, 5400.0, 45.0, 0.0, 0.5)]
    ['15m', '1h30m', '45s', '0s', 0.5]
    """
    if seconds % 1:
        return seconds
    text, left = "", int(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def _format_setting(name: str, value: object) -> Shown:
    if name.endswith("_seconds") and isinstance(value, int | float):
        return _format_duration(value)
    if name == "stop_hours" and isinstance(value, dict):
        return f"{','.join(value['days'])} {value['from']}-{value['to']} {value['time_zone']}"
    if value is None and name in LISTS:
        return LISTS[name]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{quota}={most}" for quota, most in value.items())
    return "none" if value is None else value if isinstance(value, bool | int | float) else str(value)


PULL = "pull:"
"""Prefix of the names of pull endpoints in lists."""


def add_endpoint(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "endpoint", text)
    add_command(verbs, "ls", list_endpoints, "list")
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
        help="the types for receiver, parking_receiver, owner, team or on_call (default: what suits URL and format)",
    )
    adding.add_argument("--format", default="standard", help="slack, teams or email: messages for people")
    listing = add_command(verbs, "deliveries", list_deliveries)
    listing.add_argument("--state", choices=("waiting", "delivered", "dead", "cancelled"), help="only in this state")
    listing.add_argument("--since", help="only of events since then: 15m, 12h, 30d, or a time")
    listing.add_argument("--limit", type=parse_count, default=50, metavar="N", help="default: %(default)s")
    for name, run in (("test", send_test), ("rotate", rotate_secret), ("rm", remove_endpoint)):
        add_command(verbs, name, run).add_argument("endpoint", metavar="ENDPOINT", help="its id or URL")


def list_endpoints(options: argparse.Namespace) -> int:
    """List the endpoints of the project."""
    items = connect(options).connection.get("/endpoints")["items"]
    return show_list(
        options,
        items,
        ("id", "url", "events", "enabled", "failures in a row"),
        [
            (item["id"], item["url"], ", ".join(item["event_types"]), item["enabled"], item["failures"])
            for item in items
        ],
    )


def create_endpoint(options: argparse.Namespace) -> int:
    """Add an endpoint and print its signing secret, which cannot be shown again."""
    signs = options.format == "standard"
    connection, events = connect(options).connection, {"event_types": options.event, "preset": options.preset}
    if options.address.startswith(PULL):
        made = connection.post("/pull/endpoints", {"name": options.address.removeprefix(PULL), **events})
    else:
        made = connection.post("/endpoints", {"url": options.address, "format": options.format, **events})
    return show_result(options, made, made["secret"] if signs else f"endpoint {made['url']} was added")


def send_test(options: argparse.Namespace) -> int:
    """Send a signed test event to an endpoint, and print its answer."""
    api = connect(options)
    tested = api.connection.post(f"/endpoints/{_find_endpoint_id(api, options.endpoint)}/test")
    show_result(options, tested, _describe_test(tested))
    return OK if tested["delivered"] else FAILED


def rotate_secret(options: argparse.Namespace) -> int:
    """Give an endpoint a new signing secret and print it; the previous one stays valid for a day."""
    api = connect(options)
    rotated = api.connection.post(f"/endpoints/{_find_endpoint_id(api, options.endpoint)}/rotate-secret")
    return show_result(options, rotated, rotated["secret"])


def list_deliveries(options: argparse.Namespace) -> int:
    """List what was sent to the endpoints, or waits, newest first."""
    query = {"state": options.state, "since": parse_moment(options.since)}
    items = list(islice(connect(options).connection.pages("/deliveries", query), options.limit))
    fields = ("event_type", "url", "state", "attempts", "last_error")
    rows = [(parse_time(item["created_at"]), *(item[name] for name in fields)) for item in items]
    return show_list(options, items, ("created", "event", "to", "state", "attempts", "error"), rows)


def remove_endpoint(options: argparse.Namespace) -> int:
    """Remove an endpoint and cancel its waiting deliveries."""
    api = connect(options)
    endpoint_id = _find_endpoint_id(api, options.endpoint)
    api.connection.delete(f"/endpoints/{endpoint_id}")
    return show_result(options, {"id": endpoint_id, "removed": True}, f"endpoint {options.endpoint} was removed")


def _find_endpoint_id(api: Api, id_or_url: str) -> str:
    if is_id(id_or_url):
        return id_or_url
    for item in api.connection.get("/endpoints")["items"]:
        if item["url"] == id_or_url:
            return str(item["id"])
    raise NotFound(f"no endpoint has the URL {id_or_url!r}.")


def _describe_test(tested: Json) -> str:
    answered = f"it answered {tested['status_code']}" if tested["status_code"] is not None else tested["error"]
    if tested["delivered"]:
        return f"{tested['url']}: delivered: {answered}"
    return f"{tested['url']}: not delivered: {answered}" + (f": {tested['answer']}" if tested["answer"] else "")


SCOPES = ("ingest", "read", "report", "operate", "admin")

MOST_DAYS = 36_500

FIRST = "The first key is printed by `evalstop up`, or created on its machine by `evalstop admin key create`."


def add_key(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "key", f"{text} {FIRST}")
    add_command(verbs, "ls", list_keys, "list")
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
    revoke = add_command(verbs, "revoke", revoke_key)
    revoke.add_argument("key", metavar="KEY", help="its id, or its name if that is unique among active keys")


def list_keys(options: argparse.Namespace) -> int:
    """List the keys of the project, revoked ones included."""
    items = _load_keys(connect(options))
    fields = ("last_used_at", "expires_at", "revoked_at")
    return show_list(
        options,
        items,
        ("id", "name", "scopes", "last used", "expires", "revoked"),
        [(k["id"], k["name"], ", ".join(k["scopes"]), *(parse_time(k[field]) for field in fields)) for k in items],
    )


def create_key(options: argparse.Namespace) -> int:
    """Create a key of the project and print it; it cannot be shown again."""
    lifetime = options.expires_in_days
    if lifetime is not None and lifetime > MOST_DAYS:
        raise ConfigurationError(
            f"expires-in-days {lifetime}: it may be {MOST_DAYS} at most; without it a key never expires."
        )
    expires_at = None if lifetime is None else (datetime.now(UTC) + timedelta(days=lifetime)).isoformat()
    body = {
        "name": options.name,
        "scopes": options.scopes,
        "expires_at": expires_at,
        "networks": options.network,
        "endpoint_ids": options.endpoint,
    }
    made = connect(options).connection.post("/keys", body)
    return show_result(options, made, made["key"])


def revoke_key(options: argparse.Namespace) -> int:
    """Revoke a key."""
    api = connect(options)
    key_id = _find_key_id(api, options.key)
    api.connection.delete(f"/keys/{key_id}")
    return show_result(options, {"id": key_id, "revoked": True}, f"key {options.key} was revoked")


def _load_keys(api: Api) -> list[Json]:
    return list(api.connection.pages("/keys", {}))


def _find_key_id(api: Api, name: str) -> str:
    """The id of the key with this id or name."""
    if is_id(name):
        return name
    key_ids = [key["id"] for key in _load_keys(api) if key["name"] == name and key["revoked_at"] is None]
    if not key_ids:
        raise NotFound(f"no active key is called {name!r}.")
    if len(key_ids) > 1:
        raise Rejected(f"{len(key_ids)} active keys are called {name!r}; give an id.")
    return str(key_ids[0])

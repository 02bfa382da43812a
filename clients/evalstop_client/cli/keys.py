"""`evalstop key`: creates, rotates and revokes keys of the project over HTTP."""

from __future__ import annotations

import argparse
import math
from datetime import UTC, datetime, timedelta
from functools import partial

from evalstop_client.cli.command import Subcommands, add_command, add_group, connect, parse_time, show_list, show_result
from evalstop_client.errors import NotFound, Rejected
from evalstop_client.reading.api import Api, is_id
from evalstop_client.service import Json

SCOPES = ("ingest", "read", "report", "operate", "admin")

MOST_DAYS = 36_500
MOST_OVERLAP_SECONDS = 30 * 86_400

FIRST = "The first key is printed by `evalstop up`, or created on its machine by `evalstop admin key create`."


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "key", f"{text} {FIRST}")
    add_command(verbs, "ls", list_keys, "list")
    create = add_command(verbs, "create", create_key)
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["ingest"], help="what it may do (default ingest)"
    )
    days = partial(_parse_number, MOST_DAYS, "days")
    create.add_argument("--expires-in-days", type=days, metavar="DAYS", help="days until the key expires")
    create.add_argument(
        "--network", action="append", default=[], metavar="CIDR", help="network from which it is accepted (default any)"
    )
    create.add_argument(
        "--endpoint", action="append", default=[], metavar="ID", help="bind a key with the scope report to it"
    )
    rotate = add_command(verbs, "rotate", rotate_key)
    rotate.add_argument(
        "--overlap-seconds",
        type=partial(_parse_number, MOST_OVERLAP_SECONDS, "seconds"),
        default=86_400.0,
        metavar="S",
        help="how long the current secret stays valid (default: a day)",
    )
    revoke = add_command(verbs, "revoke", revoke_key)
    for command in (rotate, revoke):
        command.add_argument("key", metavar="KEY", help="its id, or its name if that is unique among active keys")


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


def rotate_key(options: argparse.Namespace) -> int:
    """Give a key a new secret and print it once; the current one stays valid for a while."""
    api = connect(options)
    body = {"overlap_seconds": options.overlap_seconds}
    made = api.connection.post(f"/keys/{_find_key_id(api, options.key)}/rotate", body)
    return show_result(options, made, made["key"])


def revoke_key(options: argparse.Namespace) -> int:
    """Revoke a key."""
    api = connect(options)
    key_id = _find_key_id(api, options.key)
    api.connection.delete(f"/keys/{key_id}")
    return show_result(options, {"id": key_id, "revoked": True}, f"key {options.key} was revoked")


def _parse_number(most: int, unit: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text}: it must be from 0 to {most} {unit}")
    return number


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

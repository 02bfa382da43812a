"""`evalstop endpoint`: webhook endpoints."""

from __future__ import annotations

import argparse

from evalstop_client.cli.command import FAILED, OK, Subcommands, add_command, add_group, connect, show_list, show_result
from evalstop_client.errors import NotFound
from evalstop_client.reading.api import Api, is_id
from evalstop_client.service import Json

PULL = "pull:"
"""Prefix of the names of pull endpoints in lists."""


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "endpoint", text)
    add_command(verbs, "ls", list_endpoints, "list")
    adding = add_command(verbs, "add", add_endpoint)
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
    for name, run in (("test", send_test), ("rm", remove_endpoint)):
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


def add_endpoint(options: argparse.Namespace) -> int:
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

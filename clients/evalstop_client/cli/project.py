"""`evalstop project`: the settings of the key's project."""

from __future__ import annotations

import argparse
import json
from datetime import datetime

from evalstop_client.cli.command import (
    OK,
    Shown,
    Subcommands,
    add_command,
    add_group,
    connect,
    print_facts,
    print_json,
    show_result,
)
from evalstop_client.errors import ConfigurationError
from evalstop_client.service import Json
from evalstop_client.settings import parse_pairs

LISTS = ("allowed_policies",)
LIST_WORDS: dict[str, list[str] | None] = {"any": None, "none": []}
"""For a list null is no bound, and so the opposite of an empty one."""
WORDS = {"none": None, "yes": True, "no": False}
SET_ELSEWHERE = {
    "role_patterns": "on the settings page of the dashboard, or by PUT /api/v1/project/role-patterns",
    "quotas": "by `evalstop admin project quotas`, on the service's machine",
    "paused_at": "by `evalstop project pause` and `evalstop project resume`",
}
"""How to change what `show` prints and `set` does not take."""


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "project", text)
    add_command(verbs, "show", show_project)
    setting = add_command(verbs, "set", set_project)
    setting.add_argument(
        "settings",
        nargs="+",
        metavar="SETTING=VALUE",
        help="such as max_mode=enforce; `none` for no value; commas between several values policies, any: all",
    )
    pausing = add_command(verbs, "pause", pause_project)
    pausing.add_argument("--reason", default="", help="shown with each stop on hold")
    pausing.add_argument(
        "--until", metavar="TIME", type=_parse_end, help="when it resumes by itself: 4h, 2d, or a time (default: never)"
    )
    add_command(verbs, "resume", resume_project)


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
    if name in LISTS and text in LIST_WORDS:
        return LIST_WORDS[text]
    if text in WORDS:
        return WORDS[text]
    if name in LISTS:
        return [part.strip() for part in text.split(",") if part.strip()]
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
        return "any"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{quota}={most}" for quota, most in value.items())
    return "none" if value is None else value if isinstance(value, bool | int | float) else str(value)

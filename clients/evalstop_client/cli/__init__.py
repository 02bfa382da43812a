"""Parses the command line and runs the command, which is imported on demand.

Other distributions add commands through the entry point group `evalstop.commands`: a module with `COMMANDS`, a mapping
from name to help text, and `main(arguments)`. The service adds those that work on the installation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Protocol, cast

from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.version import __version__

GROUP = "evalstop.commands"

OK, FAILED, USAGE = 0, 1, 2

COMMANDS = {
    "runs": ("runs", "List, show and follow runs, or stop one."),
    "decisions": ("runs", "List decisions; veto, release, undo or label one."),
    "precision": ("runs", "Show how often policies, or their detectors, were right."),
    "groups": ("runs", "List and show groups of runs; set the rule that compares their runs."),
    "digest": ("project", "Show the digest of the last 7 days, as endpoints with project.digest get it."),
    "endpoint": (
        "project",
        "List, add, test, rotate and remove webhook endpoints; list deliveries.",
    ),
    "policy": ("policies", "List, backtest and add policies, and move them between rollout stages."),
    "proposals": ("policies", "List, confirm and refuse what waits for another person."),
    "project": ("project", "Show or change the settings of the key's project."),
    "pause": ("project", "Pause all stops in the project until it is resumed."),
    "resume": ("project", "Resume stops in a paused project."),
    "key": ("project", "List, create and revoke keys of the project; requires the scope admin."),
    "doctor": ("doctor", "Explain on one screen why a run is not stopped."),
}
"""Module and help text by name."""


class Addition(Protocol):
    """A module that adds commands."""

    COMMANDS: Mapping[str, str]

    def main(self, arguments: Sequence[str]) -> int:
        """Run one of the commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 on failure or if something blocks a stop, 2 on wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may have no letters for a name
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else ""
    additions = [] if name in COMMANDS else load_additions()
    for addition in additions:
        if name in addition.COMMANDS:
            return addition.main(arguments)
    try:
        require_command(name, additions)
        options = parser(arguments, additions).parse_args(arguments)
        return int(options.command(options))
    except ConfigurationError as error:
        sys.stderr.write(f"evalstop: {error}\n")
        return USAGE
    except EvalStopError as error:
        sys.stderr.write(f"evalstop: {error}\n")
        return FAILED
    except BrokenPipeError:  # `evalstop runs ls | head`
        sys.stderr.close()
        return OK
    except KeyboardInterrupt:
        return FAILED


def parser(arguments: Sequence[str], additions: Sequence[Addition] = ()) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the command in `arguments`; `command` is its function."""
    root = argparse.ArgumentParser(
        prog="evalstop",
        description="Manage runs, decisions and settings of a project over HTTP, with EVALSTOP_URL and EVALSTOP_KEY.",
        epilog=f"{_describe(additions)}exit codes: 0 success; 1 failure, or `doctor` found what blocks a stop; "
        "2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"evalstop {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command, (module, text) in COMMANDS.items():
        if arguments and command == arguments[0]:
            getattr(import_module(f"{__name__}.{module}"), f"add_{command}")(commands, text)
        else:
            commands.add_parser(command, help=text)
    for addition in additions:
        for command in addition.COMMANDS:
            commands.add_parser(command)  # without help text, so that it is not listed twice
    return root


def require_command(name: str, additions: Sequence[Addition]) -> None:
    """Raise ConfigurationError, which names the distribution to install, for a command that only the service may have.

    With the service, argparse names all commands.
    """
    if name and not name.startswith("-") and name not in COMMANDS and not additions:
        raise ConfigurationError(
            f"{name}: not a command of evalstop-client ({', '.join(COMMANDS)}). "
            "`evalstop up` and the other commands of the service need: pip install evalstop-service"
        )


def load_additions() -> list[Addition]:
    """The modules of other distributions that add commands."""
    return [cast(Addition, point.load()) for point in entry_points(group=GROUP)]


def _describe(additions: Sequence[Addition]) -> str:
    lines = [f"  {name:<20} {text}" for addition in additions for name, text in addition.COMMANDS.items()]
    if not lines:
        return "`evalstop up` and the other commands of the service come with evalstop-service.\n\n"
    return "\n".join(["commands of the service, for use on its machine:", *lines, "", ""])

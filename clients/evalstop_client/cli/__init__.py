"""Parses the command line and runs the command.

Other distributions add commands through the entry point group `evalstop.commands`: a module with `COMMANDS`, a mapping
from name to help text, and `main(arguments)`. The service adds those that work on the installation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Any

from evalstop_client.cli import doctor, policies, project, runs
from evalstop_client.errors import ConfigurationError, EvalStopError
from evalstop_client.version import __version__

GROUP = "evalstop.commands"

OK, FAILED, USAGE = 0, 1, 2

COMMANDS = {
    "runs": (runs.add_runs, "List, show and compare runs, or stop one."),
    "decisions": (runs.add_decisions, "List decisions; veto, release, undo or label one."),
    "precision": (runs.add_precision, "Show how often policies, or their detectors, were right."),
    "groups": (runs.add_groups, "Set the rule that compares the runs of a group."),
    "endpoint": (project.add_endpoint, "List, add, test, rotate and remove webhook endpoints; list deliveries."),
    "policy": (policies.add_policy, "List and add policies, and move them between rollout stages."),
    "proposals": (policies.add_proposals, "List, confirm and refuse what waits for another person."),
    "project": (project.add_project, "Show or change the settings of the key's project."),
    "pause": (project.add_pause, "Pause all stops in the project until it is resumed."),
    "resume": (project.add_resume, "Resume stops in a paused project."),
    "key": (project.add_key, "List, create and revoke keys of the project; requires the scope admin."),
    "doctor": (doctor.add_doctor, "Explain on one screen why a run is not stopped."),
}
"""What adds each command to the parser, and its help text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 on failure or if something blocks a stop, 2 on wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may have no letters for a name
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else ""
    additions = [] if name in COMMANDS else [point.load() for point in entry_points(group=GROUP)]
    for addition in additions:
        if name in addition.COMMANDS:
            return int(addition.main(arguments))
    try:
        if not additions and name and not name.startswith("-") and name not in COMMANDS:
            raise ConfigurationError(f"{name}: not a command; those of the service need: pip install evalstop-service")
        options = parser(additions).parse_args(arguments)
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


def parser(additions: Sequence[Any] = ()) -> argparse.ArgumentParser:
    """The parser of all commands; the function of the parsed one is the option `command`."""
    texts = [f"  {name:<20} {text}" for addition in additions for name, text in addition.COMMANDS.items()]
    others = "\n".join(["commands of the service, for use on its machine:", *texts])
    root = argparse.ArgumentParser(
        prog="evalstop",
        description="Manage runs, decisions and settings of a project over HTTP, with EVALSTOP_URL and EVALSTOP_KEY.",
        epilog=f"{others if texts else '`evalstop up` and others come with evalstop-service.'}\n\n"
        "exit codes: 0 success; 1 failure, or `doctor` found what blocks a stop; 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"evalstop {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add, text in COMMANDS.values():
        add(commands, text)
    for addition in additions:
        for command in addition.COMMANDS:
            commands.add_parser(command)  # without help text, so that it is not listed twice
    return root

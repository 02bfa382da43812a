"""Commands with placeholders for labels: `my-cancel {job_id}` becomes a list of arguments, never a shell command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from evalstop_client.errors import ConfigurationError, RequestRefused

PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_.-]*)\}|[{}]")
ALLOWED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%+,=/\[\]-]{0,255}", re.ASCII)


@dataclass(frozen=True)
class Template:
    """A command as arguments that may contain `{label}`; `{{` and `}}` are literal braces."""

    arguments: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(
            match[1] for argument in self.arguments for match in PLACE.finditer(argument) if match[1] is not None
        )

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """The command for these labels; raises RequestRefused if one is missing or not allowed."""
        checked = {name: allowed(name, values.get(name, "")) for name in self.names}

        def fill(match: re.Match[str]) -> str:
            return checked[match[1]] if match[1] is not None else match[0][0]

        return [PLACE.sub(fill, argument) for argument in self.arguments]


def parse_template(text: str) -> Template:
    """Split a command as a shell does; raises ConfigurationError."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"command {text!r}: {error}.") from None
    if not arguments:
        raise ConfigurationError("command: it is empty; write one such as 'my-cancel {job_id}'.")
    for argument in arguments:
        stray = [match[0] for match in PLACE.finditer(argument) if match[0] in ("{", "}")]
        if stray:
            raise ConfigurationError(
                f"command {text!r}: {argument!r} has a brace that is not a {{label}}; write a literal one twice."
            )
    if "{" in arguments[0]:
        raise ConfigurationError(f"command {text!r}: the program itself cannot come from a label.")
    return Template(arguments)


def allowed(name: str, value: str) -> str:
    """Return the value if it is safe: not an option, not a path upwards, no character that is expanded."""
    if not value:
        raise RequestRefused(f"the run has no label {name}, which the command needs")
    if not ALLOWED.fullmatch(value) or ".." in value:
        raise RequestRefused(
            f"label {name} is {value[:80]!r}: letters, digits and _.:@%+,=/[]- are allowed, "
            "the first one a letter, a digit or _, no two dots in a row, 256 at most"
        )
    return value

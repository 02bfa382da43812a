"""What a visitor of the pages may do in which project: by the scopes of a key, or by what a provider says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

EVERY = "*"
"""All projects."""

LONGEST_NAME = 200


class VisitorRole(StrEnum):
    """What a visitor may do. Each may do all that those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, wanted: VisitorRole) -> bool:
        """Whether this role may do what `wanted` may."""
        return _RANKS.index(self) >= _RANKS.index(wanted)


_RANKS = tuple(VisitorRole)


def of_scopes(scopes: Iterable[str]) -> VisitorRole | None:
    """The role that a key's scopes give; None where they do not open the pages."""
    held = set(scopes)
    if "admin" in held:
        return VisitorRole.ADMIN
    if "read" not in held:
        return None
    return VisitorRole.OPERATOR if "operate" in held else VisitorRole.VIEWER


@dataclass(frozen=True)
class Grant:
    """A role in a project, for the members of a group or for whoever has an e-mail address."""

    project: str
    role: VisitorRole
    group: str | None = None
    email: str | None = None


@dataclass(frozen=True)
class Grants:
    """Who gets what, and in which claims a provider says who they are."""

    entries: tuple[Grant, ...]
    groups_claim: str = "groups"
    name_claim: str = "name"

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims that have to be known."""
        return (self.groups_claim, self.name_claim, "email")

    def of(self, claims: Mapping[str, Any]) -> dict[str, str]:
        """The highest role in each project that these claims give. An address counts only when it is verified."""
        told = claims.get(self.groups_claim)
        groups = [group for group in (told if isinstance(told, list) else [told]) if isinstance(group, str)]
        email = _email(claims)
        found: dict[str, VisitorRole] = {}
        for grant in self.entries:
            if grant.group in groups or (email is not None and grant.email == email):
                held = found.get(grant.project)
                found[grant.project] = grant.role if held is None or grant.role.covers(held) else held
        return {project: role.value for project, role in found.items()}

    def name(self, claims: Mapping[str, Any]) -> str:
        """What to call somebody: by their verified address, else by name, else as the provider numbers them."""
        named = claims.get(self.name_claim)
        text = _email(claims) or (named if isinstance(named, str) else "") or str(claims["sub"])
        plain = "".join(character if character.isprintable() else " " for character in text).strip()
        return plain[:LONGEST_NAME] or "nameless"


def role_in(grants: Mapping[str, str], project: str) -> VisitorRole | None:
    """The role that somebody with these grants has in a project."""
    roles = [VisitorRole(grants[name]) for name in (project, EVERY) if name in grants]
    return max(roles, key=_RANKS.index, default=None)


def parse(text: str) -> tuple[Grant, ...]:
    """The grants in a JSON text, or in the file that it names; ValueError says what is wrong where."""
    try:
        found = json.loads(text if text.lstrip().startswith("[") else Path(text).read_text())
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}; write a JSON list, or the path of a file that holds one") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise ValueError('a JSON list as in [{"group": "ml-oncall", "project": "alignment", "role": "operator"}]')
    return tuple(_grant(number, entry) for number, entry in enumerate(found, 1))


def _grant(number: int, entry: Any) -> Grant:
    if not isinstance(entry, dict) or not all(isinstance(value, str) and value for value in entry.values()):
        raise ValueError(f"grant {number} is no object of texts")
    if set(entry) not in ({"group", "project", "role"}, {"email", "project", "role"}):
        raise ValueError(f"grant {number} has {sorted(entry)}; it takes project, role, and either group or email")
    if entry["role"] not in _RANKS:
        raise ValueError(f"grant {number} gives the role {entry['role']!r}; there are {', '.join(_RANKS)}")
    who = {name: entry[name] for name in ("group", "email") if name in entry}
    if "email" in who:
        who["email"] = who["email"].lower()
    return Grant(entry["project"], VisitorRole(entry["role"]), **who)


def _email(claims: Mapping[str, Any]) -> str | None:
    email = claims.get("email")
    return email.lower() if isinstance(email, str) and claims.get("email_verified") is True else None

"""What a dashboard visitor may do in which project: by the scopes of a key, or by OpenID claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

EVERY = "*"
"""All projects."""

MAX_NAME_CHARACTERS = 200


class VisitorRole(StrEnum):
    """What a visitor may do. Each role includes those before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: VisitorRole) -> bool:
        """Whether this role includes `needed`."""
        return _RANKS.index(self) >= _RANKS.index(needed)


_RANKS = tuple(VisitorRole)


def role_of_scopes(scopes: Iterable[str]) -> VisitorRole | None:
    """The role of a key with these scopes; None when it has no access to the dashboard."""
    granted = set(scopes)
    if "admin" in granted:
        return VisitorRole.ADMIN
    if "read" not in granted:
        return None
    return VisitorRole.OPERATOR if "operate" in granted else VisitorRole.VIEWER


_Text = Annotated[str, Meta(min_length=1)]


class Grant(Struct, frozen=True, forbid_unknown_fields=True):
    """A role in a project for the members of a group, or for the owner of an e-mail address."""

    project: _Text
    role: VisitorRole
    group: _Text | None = None
    email: _Text | None = None

    def __post_init__(self) -> None:
        if (self.group is None) == (self.email is None):
            raise ValueError("a grant needs project, role, and either group or email")
        if self.email is not None and not self.email.isascii():
            raise ValueError("an e-mail address must be ASCII")


@dataclass(frozen=True)
class Grants:
    """All grants, and the claim that lists the groups of a person."""

    entries: tuple[Grant, ...]
    groups_claim: str = "groups"

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims needed to evaluate the grants."""
        return (self.groups_claim, "name", "email")

    def find_roles(self, claims: Mapping[str, Any]) -> dict[str, str]:
        """The highest role in each project that these claims give. E-mail addresses count only when verified."""
        claimed = claims.get(self.groups_claim)
        groups = [group for group in (claimed if isinstance(claimed, list) else [claimed]) if isinstance(group, str)]
        email = _verified_email(claims)
        roles: dict[str, VisitorRole] = {}
        for grant in self.entries:
            if grant.group in groups or (
                email is not None and grant.email is not None and grant.email.lower() == email
            ):
                role = roles.get(grant.project)
                roles[grant.project] = grant.role if role is None or grant.role.covers(role) else role
        return {project: role.value for project, role in roles.items()}

    def display_name(self, claims: Mapping[str, Any]) -> str:
        """The verified e-mail address of a person, else the name, else the provider's identifier."""
        name = claims.get("name")
        text = _verified_email(claims) or (name if isinstance(name, str) else "") or str(claims["sub"])
        plain = "".join(character if character.isprintable() else " " for character in text).strip()
        return plain[:MAX_NAME_CHARACTERS] or "nameless"


def find_role(grants: Mapping[str, str], project: str) -> VisitorRole | None:
    """The role in a project that these grants give."""
    roles = [VisitorRole(grants[name]) for name in (project, EVERY) if name in grants]
    return max(roles, key=_RANKS.index, default=None)


def parse_grants(text: str) -> tuple[Grant, ...]:
    """The grants in a JSON text or in the file that it names; raises ValueError with the place of the error."""
    try:
        document = text if text.lstrip().startswith("[") else Path(text).read_text()
        grants: tuple[Grant, ...] = msgspec.json.decode(document, type=Annotated[tuple[Grant, ...], Meta(min_length=1)])
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}; set a JSON list, or the path of a file with one") from None
    except msgspec.DecodeError as error:
        example = '[{"group": "ml-oncall", "project": "alignment", "role": "operator"}]'
        raise ValueError(f"{error}; write a JSON list such as {example}") from None
    return grants


def _verified_email(claims: Mapping[str, Any]) -> str | None:
    email = claims.get("email")
    # Letters of other scripts can resemble ASCII or be folded to it, so addresses with such letters are not accepted.
    verified = isinstance(email, str) and email.isascii() and claims.get("email_verified") is True
    return email.lower() if isinstance(email, str) and verified else None

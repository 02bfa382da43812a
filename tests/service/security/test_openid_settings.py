"""The settings of an OpenID provider, and the roles that its grants give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evalstop_service.security.scopes import Grant, Grants, VisitorRole, find_role, parse_grants
from evalstop_service.settings import Settings
from pydantic import ValidationError

GRANTS = [
    {"group": "ml-oncall", "project": "alignment", "role": "operator"},
    {"group": "everyone", "project": "safety", "role": "viewer"},
    {"email": "Kim@example.com", "project": "safety", "role": "admin"},
]


def test_roles_and_names_from_claims() -> None:
    """The highest role counts, groups may be a string or a list, and only a verified address counts."""
    grants = Grants(parse_grants(json.dumps([*GRANTS, {"group": "root", "project": "*", "role": "viewer"}])))
    verified = {"email": "KIM@example.com", "email_verified": True}
    assert grants.find_roles({"groups": ["everyone", 7, None]} | verified) == {"safety": "admin"}
    assert grants.find_roles({"groups": "everyone", "email": "kim@example.com"}) == {"safety": "viewer"}
    assert grants.find_roles({"groups": {"everyone": 1}, "email": 7, "email_verified": "true"}) == {}
    roles = grants.find_roles({"groups": ["root", "ml-oncall"]})
    assert find_role(roles, "alignment") == VisitorRole.OPERATOR
    assert find_role(roles, "any other") == VisitorRole.VIEWER
    assert find_role({}, "alignment") is None
    assert grants.display_name({"sub": "1", "name": "key\x00 first\n" + "x" * 500}).startswith("key  first")
    assert len(grants.display_name({"sub": "1", "name": "x" * 500})) == 200
    assert grants.display_name({"sub": "1", "name": 7}) == "1"
    assert grants.display_name({"sub": "1", "name": "Kim"} | verified) == "kim@example.com"


@pytest.mark.parametrize(
    "text",
    [
        "/no/such/file",
        "[",
        "[]",
        '[{"group": "a", "email": "b", "project": "c", "role": "viewer"}]',
        '[{"project": "c", "role": "viewer"}]',
        '[{"group": "a", "project": "c", "role": "root"}]',
        '[{"group": "", "project": "c", "role": "viewer"}]',
        '[{"group": 7, "project": "c", "role": "viewer"}]',
        "[7]",
        '{"group": "a", "project": "c", "role": "viewer"}',
    ],
)
def test_invalid_grants_are_refused(text: str) -> None:
    """The service does not start with grants that it cannot read."""
    with pytest.raises(ValidationError, match="oidc_grants"):
        Settings(oidc_issuer="https://id.example", oidc_client_id="x", oidc_grants=text)


def test_grants_are_read_from_a_file(tmp_path: Path) -> None:
    """The setting may be a path to a JSON file."""
    file = tmp_path / "grants.json"
    file.write_text(json.dumps(GRANTS[:1]))
    assert parse_grants(str(file)) == (Grant("alignment", VisitorRole.OPERATOR, group="ml-oncall"),)


@pytest.mark.parametrize("issuer", ["http://id.example", "id.example", "https://", "https://id.example/?a=b"])
def test_issuer_needs_https(issuer: str) -> None:
    """An issuer without TLS, without a host or with a query is refused; plain HTTP is for loopback only."""
    with pytest.raises(ValidationError, match="issuer"):
        Settings(oidc_issuer=issuer, oidc_client_id="x", oidc_grants=json.dumps(GRANTS))


def test_provider_without_grants_is_refused() -> None:
    """The error names the missing setting."""
    with pytest.raises(ValidationError, match="EVALSTOP_OIDC_GRANTS"):
        Settings(oidc_issuer="https://id.example", oidc_client_id="x")

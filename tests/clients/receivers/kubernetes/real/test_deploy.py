"""What deploy/ has is taken by a real API server: every manifest, and every object that the chart renders to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.acceptance.packaging.test_deploy import MANIFESTS, VALUES, render_chart
from tests.clients.receivers.kubernetes.admin import Admin
from tests.clients.receivers.kubernetes.cluster import Server, manifests

pytestmark = pytest.mark.real


@pytest.fixture
def admin(server: Server) -> Iterator[Admin]:
    with closing(Admin(server.url, server.admin_token, server.tls)) as admin:
        for name in ("tools", "research", "eval", "evalstop"):
            admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield admin


@pytest.mark.parametrize("file", [file.name for file in MANIFESTS])
def test_manifests_are_taken(admin: Admin, file: str) -> None:
    """Validated and defaulted as if they were to stay."""
    assert refusals(admin, manifests(f"kubernetes/{file}")) == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_chart_is_taken(admin: Admin, values: dict[str, Any]) -> None:
    """In every way to install it."""
    assert refusals(admin, render_chart(values)) == []


def refusals(admin: Admin, items: list[dict[str, Any]]) -> list[str]:
    """What the server has against them."""
    found = []
    for item in items:
        group, _, version = item["apiVersion"].rpartition("/")
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        plural = {"NetworkPolicy": "networkpolicies"}.get(item["kind"], f"{item['kind'].lower()}s")
        namespace = item["metadata"].get("namespace", "tools")
        response = admin.http.post(f"{root}/namespaces/{namespace}/{plural}", params={"dryRun": "All"}, json=item)
        if response.status_code not in (201, 409):
            found.append(f"{item['kind']} {item['metadata']['name']}: {response.text}")
    return found

"""The manifests of deploy/ and the chart's objects are valid for a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.acceptance.packaging.test_deploy import MANIFESTS, VALUES, render_chart
from tests.clients.receivers.kubernetes.admin import Admin
from tests.clients.receivers.kubernetes.cluster import ApiServer, load_manifest

pytestmark = pytest.mark.real


@pytest.fixture
def admin(server: ApiServer) -> Iterator[Admin]:
    with closing(Admin(server.url, server.admin_token, server.tls)) as admin:
        for name in ("tools", "research", "eval", "evalstop"):
            admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield admin


@pytest.mark.parametrize("file", [file.name for file in MANIFESTS])
def test_manifests_are_accepted(admin: Admin, file: str) -> None:
    """Each manifest is validated by a dry run."""
    assert list_refusals(admin, load_manifest(f"kubernetes/{file}")) == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_chart_is_accepted(admin: Admin, values: dict[str, Any]) -> None:
    """The chart's objects are validated by a dry run, for each set of values."""
    assert list_refusals(admin, render_chart(values)) == []


def list_refusals(admin: Admin, items: list[dict[str, Any]]) -> list[str]:
    """What the server refuses, with its message."""
    refused = []
    for item in items:
        group, _, version = item["apiVersion"].rpartition("/")
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        plural = {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"}.get(
            item["kind"], f"{item['kind'].lower()}s"
        )
        namespace = item["metadata"].get("namespace", "tools")
        response = admin.http.post(f"{root}/namespaces/{namespace}/{plural}", params={"dryRun": "All"}, json=item)
        if response.status_code not in (201, 409):
            refused.append(f"{item['kind']} {item['metadata']['name']}: {response.text}")
    return refused

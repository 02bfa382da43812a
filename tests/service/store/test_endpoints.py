"""Endpoints in the store: ownership, changes, rotation and deletion."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.errors import NotFound
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue.attempts import Dead

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, settle_delivery


def test_deleting_an_endpoint_cancels_its_deliveries(database: Database, project: SeededProject) -> None:
    """A deleted endpoint is not listed, its waiting deliveries are cancelled, and none can be retried."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        project.add_event(tx)
        project.add_event(tx)
        claimed = claim_deliveries(tx, EPOCH, 10, 1)[0]
        settle_delivery(tx, claimed, Dead("HTTP 400"), EPOCH)
        endpoints.delete_endpoint(tx, project.id, endpoint.id, now=EPOCH)
        with pytest.raises(NotFound):
            endpoints.delete_endpoint(tx, project.id, endpoint.id, now=EPOCH)
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) is None
        assert endpoints.list_endpoints(tx, project.id) == []
        assert sorted(delivery.state for delivery in project.list_deliveries(tx)) == ["cancelled", "dead"]


def test_update_changes_only_given_fields(database: Database, project: SeededProject) -> None:
    """An update leaves unnamed fields alone, and waiting deliveries go to the new URL."""
    endpoint = project.add_endpoint(database, "http://old.example")
    with database.transaction() as tx:
        project.add_event(tx)
        changed = endpoints.update_endpoint(tx, project.id, endpoint.id, url="http://new.example")
        expected = ("http://new.example", endpoint.event_types, True)
        assert (changed.url, changed.event_types, changed.enabled) == expected
        assert endpoints.update_endpoint(tx, project.id, endpoint.id) == changed
        assert claim_deliveries(tx, EPOCH, 10, 1)[0].url == "http://new.example"


def test_rotated_secret_overlaps_with_the_previous(database: Database, project: SeededProject) -> None:
    """After a rotation both secrets sign for a day, then only the new one."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        rotated = endpoints.rotate_secret(tx, project.id, endpoint.id, now=EPOCH)
        project.add_event(tx)
        project.add_event(tx)
        during = claim_deliveries(tx, EPOCH + timedelta(hours=23), 10, 1)[0]
        after = claim_deliveries(tx, EPOCH + timedelta(hours=24), 10, 1)[0]
    assert during.secrets == (rotated.secret, endpoint.secret)
    assert after.secrets == (rotated.secret,)
    assert rotated.secret != endpoint.secret

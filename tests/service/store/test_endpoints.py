"""Endpoints: whose they are, and what a change does to what waits; on both databases."""

from __future__ import annotations

from datetime import timedelta

from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.attempts import Dead

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, settle, take


def test_deleting_an_endpoint_cancels(database: Database, scene: Scene) -> None:
    """A deleted endpoint is gone from sight, its waiting deliveries are cancelled, and none can be revived."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        scene.announce(tx)
        scene.announce(tx)
        claimed = take(tx, EPOCH, 10, 1)[0]
        settle(tx, claimed, Dead("HTTP 400"), EPOCH)
        assert endpoints.delete_endpoint(tx, scene.project_id, endpoint.id, now=EPOCH)
        assert not endpoints.delete_endpoint(tx, scene.project_id, endpoint.id, now=EPOCH)
        assert endpoints.find_endpoint(tx, scene.project_id, endpoint.id) is None
        assert endpoints.list_endpoints(tx, scene.project_id) == []
        assert sorted(one.state for one in scene.all(tx)) == ["cancelled", "dead"]
        assert not deliveries.retry_delivery(tx, scene.project_id, claimed.id, EPOCH)


def test_endpoints_belong_to_projects(database: Database, scene: Scene) -> None:
    """Another project can neither see, change, rotate nor delete an endpoint."""
    endpoint = scene.endpoint(database, "http://x.example")
    stranger = a_scene(database).project_id
    with database.transaction() as tx:
        assert endpoints.find_endpoint(tx, stranger, endpoint.id) is None
        assert endpoints.update_endpoint(tx, stranger, endpoint.id, url="http://evil.example") is None
        assert endpoints.rotate_secret(tx, stranger, endpoint.id, now=EPOCH) is None
        assert not endpoints.delete_endpoint(tx, stranger, endpoint.id, now=EPOCH)
        assert endpoints.find_endpoint(tx, scene.project_id, endpoint.id) == endpoint


def test_changes_what_is_given(database: Database, scene: Scene) -> None:
    """A change leaves alone what it does not name, and what waits goes to the new URL."""
    endpoint = scene.endpoint(database, "http://old.example")
    with database.transaction() as tx:
        scene.announce(tx)
        changed = endpoints.update_endpoint(tx, scene.project_id, endpoint.id, url="http://new.example")
        assert changed is not None
        expected = ("http://new.example", endpoint.event_types, True)
        assert (changed.url, changed.event_types, changed.enabled) == expected
        assert endpoints.update_endpoint(tx, scene.project_id, endpoint.id) == changed
        assert take(tx, EPOCH, 10, 1)[0].url == "http://new.example"


def test_rotates_with_two_valid(database: Database, scene: Scene) -> None:
    """After a rotation both secrets sign for the hours given, then the new one alone."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        rotated = endpoints.rotate_secret(tx, scene.project_id, endpoint.id, now=EPOCH, previous_valid_hours=2)
        assert rotated is not None
        scene.announce(tx)
        scene.announce(tx)
        during = take(tx, EPOCH + timedelta(hours=1), 10, 1)[0]
        after = take(tx, EPOCH + timedelta(hours=2), 10, 1)[0]
    assert during.secrets == (rotated.secret, endpoint.secret, endpoint.signing_key)
    assert after.secrets == (rotated.secret, endpoint.signing_key)
    assert rotated.secret != endpoint.secret

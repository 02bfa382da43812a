"""Deliveries as an operator sees them, on both databases."""

from __future__ import annotations

from uuid import UUID

from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.attempts import Dead

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, settle, take


def test_lists_by_pages(database: Database, scene: Scene) -> None:
    """Deliveries are listed newest first, page by page, each once, filtered, and only those of the project."""
    endpoint = scene.endpoint(database, "http://x.example")
    stranger = a_scene(database)
    stranger.endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        for number in range(7):
            scene.announce(tx, number)
            stranger.announce(tx, number)
        claimed = take(tx, EPOCH, 10, 100)
        dead = next(one for one in claimed if one.endpoint_id == endpoint.id)
        settle(tx, dead, Dead("HTTP 400: no"), EPOCH, duration_ms=3.5, status_code=400)
    pages: list[UUID] = []
    with database.reading() as tx:
        before = None
        while page := deliveries.list_deliveries(tx, scene.project_id, before=before, limit=3):
            pages += [one.id for one in page]
            before = pages[-1]
        assert [one.id for one in scene.all(tx)] == pages == sorted(pages, reverse=True)
        assert len(pages) == 7
        found = scene.all(tx, state="dead", endpoint_id=endpoint.id)
        assert [one.id for one in found] == [dead.id]
        assert scene.all(tx, endpoint_id=new_id()) == []
        assert deliveries.find_delivery(tx, stranger.project_id, dead.id) is None
        assert [(a.number, a.status_code, a.error, a.duration_ms) for a in deliveries.list_attempts(tx, found[0])] == [
            (1, 400, "HTTP 400: no", 3.5)
        ]
    with database.transaction() as tx:
        assert not deliveries.retry_delivery(tx, stranger.project_id, dead.id, EPOCH)

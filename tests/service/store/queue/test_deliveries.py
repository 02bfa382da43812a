"""Listing and retrying deliveries."""

from __future__ import annotations

from uuid import UUID

import pytest
from evalstop_service.errors import NotFound
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.attempts import Dead

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, seed_project, settle_delivery


def test_deliveries_are_listed_by_page(database: Database, project: SeededProject) -> None:
    """Deliveries of the project are listed newest first, by page, each once, and by filter."""
    endpoint = project.add_endpoint(database, "http://x.example")
    other_project = seed_project(database)
    other_project.add_endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        for number in range(7):
            project.add_event(tx, number)
            other_project.add_event(tx, number)
        claimed = claim_deliveries(tx, EPOCH, 10, 100)
        dead = next(delivery for delivery in claimed if delivery.endpoint_id == endpoint.id)
        settle_delivery(tx, dead, Dead("HTTP 400: no"), EPOCH, duration_ms=3.5, status_code=400)
    pages: list[UUID] = []
    with database.reading() as tx:
        before = None
        while page := outbox.list_deliveries(tx, project.id, before=before, limit=3):
            pages += [delivery.id for delivery in page]
            before = pages[-1]
        assert [delivery.id for delivery in project.list_deliveries(tx)] == pages == sorted(pages, reverse=True)
        assert len(pages) == 7
        dead_deliveries = project.list_deliveries(tx, state="dead", endpoint_id=endpoint.id)
        assert [delivery.id for delivery in dead_deliveries] == [dead.id]
        assert project.list_deliveries(tx, endpoint_id=new_id()) == []
        with pytest.raises(NotFound):
            outbox.load_delivery(tx, other_project.id, dead.id)
        assert [
            (a.number, a.status_code, a.error, a.duration_ms) for a in outbox.list_attempts(tx, dead_deliveries[0])
        ] == [(1, 400, "HTTP 400: no", 3.5)]

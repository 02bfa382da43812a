"""Replays send only events that the endpoint subscribes to."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.fixtures.projects import EVERY_EVENT
from tests.security.served_project import serve_project
from tests.service.web.api.api_calls import create_decision, expect_json, expect_problem
from tests.service.web.api.routes import ENDPOINT


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    with serve_project(database) as project:
        yield project.open_client()


def add_endpoint(client: httpx.Client, *event_types: str, format_name: str = "standard") -> str:
    url = f"{ENDPOINT['url']}{format_name}/{event_types[0].strip('*')}"
    body = {"url": url, "event_types": event_types, "format": format_name}
    return str(expect_json(client.post("/endpoints", json=body), 201)["id"])


def list_delivered_types(client: httpx.Client, endpoint_id: str) -> set[str]:
    deliveries = expect_json(client.get("/deliveries"), 200)["items"]
    return {delivery["event_type"] for delivery in deliveries if delivery["endpoint_id"] == endpoint_id}


def test_delivery_is_not_replayed_after_unsubscribing(client: httpx.Client) -> None:
    """An endpoint that no longer subscribes to a type cannot have such a delivery replayed."""
    endpoint = add_endpoint(client, *EVERY_EVENT)
    create_decision(client)
    deliveries = expect_json(client.get("/deliveries"), 200)["items"]
    stop = next(delivery["id"] for delivery in deliveries if delivery["event_type"] == "run.stop_requested")
    expect_json(client.patch(f"/endpoints/{endpoint}", json={"event_types": ["run.stopped"]}), 200)
    assert "subscribe" in expect_problem(client.post(f"/deliveries/{stop}/replay"), 409)["detail"]


def test_wildcard_subscription_excludes_stop_requests(client: httpx.Client) -> None:
    """`*` leaves out stops except for chat formats; an endpoint gets stops by naming the type."""
    observer, receiver = add_endpoint(client, "*"), add_endpoint(client, "run.stop_requested")
    chat = add_endpoint(client, "*", format_name="slack")
    create_decision(client)
    assert "run.best_checkpoint_changed" in list_delivered_types(client, observer)
    assert "run.stop_requested" not in list_delivered_types(client, observer)
    assert list_delivered_types(client, receiver) == {"run.stop_requested"}
    assert "run.stop_requested" in list_delivered_types(client, chat)

"""Pull endpoints: deliveries are claimed under a lease, signed like webhooks, settled, and left alone by workers."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
import sqlalchemy as sa
from evalstop_client.signature import verify
from evalstop_service.clock import utc_now
from evalstop_service.store.queue import leases
from evalstop_service.store.tables import decisions, deliveries

from tests.service.concurrency import run_concurrently, wait_until
from tests.service.web.api.api_calls import create_decision, expect_json, expect_problem
from tests.service.web.api.conftest import Service

CLAIM_BODY = {"wait_seconds": 0, "limit": 10, "lease_seconds": 30}


@pytest.fixture
def client(service: Service) -> httpx.Client:
    """A client with an admin key to a new project."""
    return service.open_client(service.create_project())


def create_pull_endpoint(client: httpx.Client, **more: Any) -> dict[str, Any]:
    """Create an endpoint that receivers poll."""
    body = {"name": "login-node", "event_types": ["run.stop_requested"], **more}
    return expect_json(client.post("/pull/endpoints", json=body), 201)


def claim(client: httpx.Client, endpoint_id: str, **more: Any) -> list[dict[str, Any]]:
    """The events of a claim without waiting, unless `more` says otherwise."""
    response = client.post(f"/pull/endpoints/{endpoint_id}/claim", json={**CLAIM_BODY, **more})
    events: list[dict[str, Any]] = expect_json(response, 200)["events"]
    return events


def settle(client: httpx.Client, endpoint_id: str, event: dict[str, Any], status: int, error: str = "") -> bool:
    """Whether the delivery was settled with this status."""
    body = {"delivery_id": event["delivery_id"], "attempt": event["attempt"], "status": status, "error": error}
    return bool(expect_json(client.post(f"/pull/endpoints/{endpoint_id}/settle", json=body), 200)["settled"])


def find_delivery(client: httpx.Client, endpoint_id: str) -> dict[str, Any]:
    """The only delivery to an endpoint."""
    items: list[dict[str, Any]] = client.get("/deliveries", params={"endpoint_id": endpoint_id}).json()["items"]
    (delivery,) = items
    return delivery


def test_name_is_unique_until_its_endpoint_is_deleted(client: httpx.Client) -> None:
    """The command line finds an endpoint by its name; two of one name would both keep every stop."""
    endpoint = create_pull_endpoint(client, name="twice")
    assert endpoint["id"] in expect_problem(client.post("/pull/endpoints", json={"name": "twice"}), 409)["detail"]
    assert client.delete(f"/endpoints/{endpoint['id']}").status_code == 204
    create_pull_endpoint(client, name="twice")


def test_claimed_event_is_signed_and_delivered_once_settled(client: httpx.Client) -> None:
    """A claim returns the body and headers that a webhook would have."""
    endpoint = create_pull_endpoint(client)
    assert endpoint["url"] == "pull:login-node"
    assert claim(client, endpoint["id"]) == []
    decision_id = create_decision(client)
    (event,) = claim(client, endpoint["id"])
    assert verify([endpoint["secret"]], event["headers"], event["body"].encode(), time.time())
    assert decision_id in event["body"]
    assert claim(client, endpoint["id"]) == []  # leased
    assert settle(client, endpoint["id"], event, 202)
    assert not settle(client, endpoint["id"], event, 202)  # settled already
    assert claim(client, endpoint["id"]) == []
    delivery = find_delivery(client, endpoint["id"])
    assert (delivery["state"], delivery["attempts"], delivery["log"][0]["status_code"]) == ("delivered", 1, 202)


def test_expired_lease_lets_the_event_be_claimed_again(client: httpx.Client, service: Service) -> None:
    """The event keeps its id, and the old lease no longer settles it."""
    endpoint = create_pull_endpoint(client)
    create_decision(client)
    (first,) = claim(client, endpoint["id"], lease_seconds=5)
    expire_lease(service, first["delivery_id"])
    (second,) = claim(client, endpoint["id"])
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["headers"]["webhook-id"] == second["headers"]["webhook-id"]
    assert not settle(client, endpoint["id"], first, 202)
    assert settle(client, endpoint["id"], second, 202)


@pytest.mark.parametrize(("status", "state"), [(401, "waiting"), (503, "waiting"), (422, "dead"), (410, "dead")])
def test_settled_status_is_handled_like_a_webhook_response(client: httpx.Client, status: int, state: str) -> None:
    """A retryable status is tried again, a permanent one is dead, and 410 disables the endpoint."""
    endpoint = create_pull_endpoint(client)
    create_decision(client)
    (event,) = claim(client, endpoint["id"])
    assert settle(client, endpoint["id"], event, status, "out of order")
    delivery = find_delivery(client, endpoint["id"])
    assert delivery["state"] == state
    assert delivery["last_error"].startswith(f"HTTP {status}: out of order")
    assert claim(client, endpoint["id"]) == []
    (listed_endpoint,) = client.get("/endpoints").json()["items"]
    assert listed_endpoint["enabled"] is (status != 410)


def test_claim_returns_when_an_event_arrives(client: httpx.Client) -> None:
    """A claim without events returns empty after four fifths of its wait at least."""
    endpoint = create_pull_endpoint(client)
    started_at = time.monotonic()
    assert claim(client, endpoint["id"], wait_seconds=0.5) == []
    assert time.monotonic() - started_at >= 0.4
    events: list[dict[str, Any]] = []
    poll = threading.Thread(target=lambda: events.extend(claim(client, endpoint["id"], wait_seconds=60)))
    poll.start()
    create_decision(client)
    poll.join(60)
    assert not poll.is_alive()
    assert len(events) == 1


def test_concurrent_claims_return_each_event_once(client: httpx.Client) -> None:
    """Six events are claimed by four polls at a time, none twice."""
    endpoint = create_pull_endpoint(client)
    for _ in range(6):
        create_decision(client)
    claimed_ids: list[str] = []

    def poll(limit: int = 2) -> None:
        claimed_ids.extend(event["delivery_id"] for event in claim(client, endpoint["id"], limit=limit))

    assert run_concurrently(*[poll] * 4) == []
    poll(limit=10)
    assert len(claimed_ids) == len(set(claimed_ids)) == 6


def test_workers_do_not_claim_pull_deliveries(client: httpx.Client, service: Service) -> None:
    """Workers neither find nor claim deliveries to a pull endpoint."""
    endpoint = create_pull_endpoint(client)
    create_decision(client)
    with service.database.transaction() as tx:
        now = utc_now() + timedelta(seconds=1)
        endpoint_id = UUID(endpoint["id"])
        assert endpoint_id not in {
            delivery.endpoint_id for delivery in leases.find_due_deliveries(tx, now, 1_000, 1_000)
        }
        assert endpoint_id not in {
            delivery.endpoint_id for delivery in leases.claim_deliveries(tx, now, 0.0, 1_000, 1_000)
        }
    assert len(claim(client, endpoint["id"])) == 1


def test_stop_can_be_claimed_after_its_veto_window(service: Service) -> None:
    """The decision becomes `requested` with the claim; a vetoed stop is never returned."""
    client = service.open_client(service.create_project(veto_window_seconds=3600.0))
    endpoint = create_pull_endpoint(client)
    due, vetoed = create_decision(client), create_decision(client)
    assert client.post(f"/decisions/{vetoed}/veto", json={"reason": "no"}).status_code == 200
    assert claim(client, endpoint["id"]) == []
    with service.database.transaction() as tx:  # the window ends
        tx.execute(sa.update(decisions).where(decisions.c.id == UUID(due)).values(due_at=utc_now()))
        waiting = sa.update(deliveries).where(deliveries.c.endpoint_id == UUID(endpoint["id"]))
        tx.execute(waiting.values(due_at=utc_now()))
    (event,) = claim(client, endpoint["id"], wait_seconds=20)
    assert due in event["body"]
    assert client.get(f"/decisions/{due}").json()["state"] == "requested"
    assert claim(client, endpoint["id"], wait_seconds=0.5) == []


def test_only_pull_endpoints_can_be_claimed_from(client: httpx.Client) -> None:
    """A webhook endpoint is not found, nor is a delivery that the endpoint does not have."""
    webhook_endpoint = expect_json(client.post("/endpoints", json={"url": "http://127.0.0.1:1/"}), 201)
    expect_problem(client.post(f"/pull/endpoints/{webhook_endpoint['id']}/claim", json=CLAIM_BODY), 404)
    path = f"/pull/endpoints/{create_pull_endpoint(client)['id']}/settle"
    expect_problem(client.post(path, json={"delivery_id": str(uuid4()), "attempt": 1, "status": 200}), 404)


def test_disabled_and_deleted_endpoints_return_no_events(client: httpx.Client) -> None:
    """A pull endpoint is disabled and deleted by the same routes as a webhook."""
    endpoint = create_pull_endpoint(client)
    create_decision(client)
    client.patch(f"/endpoints/{endpoint['id']}", json={"enabled": False})
    assert claim(client, endpoint["id"]) == []
    client.patch(f"/endpoints/{endpoint['id']}", json={"enabled": True})
    assert len(claim(client, endpoint["id"])) == 1
    client.delete(f"/endpoints/{endpoint['id']}")
    assert client.post(f"/pull/endpoints/{endpoint['id']}/claim", json=CLAIM_BODY).status_code == 404


def test_disconnected_claim_takes_no_event(service: Service, client: httpx.Client) -> None:
    """An event that arrives after a receiver disconnected is left for the next claim."""
    endpoint = create_pull_endpoint(client)
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"/pull/endpoints/{endpoint['id']}/claim", json={**CLAIM_BODY, "wait_seconds": 60}, timeout=0.5)
    port = int(service.url.rpartition(":")[2])
    wait_until(lambda: not find_half_closed_connections(port))
    create_decision(client)
    assert len(claim(client, endpoint["id"], wait_seconds=20)) == 1


def find_half_closed_connections(port: int) -> list[object]:
    """The connections to a server of this process whose client has gone, which the server has not noticed yet."""
    connections = psutil.Process().net_connections("tcp4")
    return [each for each in connections if each.laddr.port == port and each.status == psutil.CONN_CLOSE_WAIT]


def expire_lease(service: Service, delivery_id: str) -> None:
    """Expire the lease of a delivery."""
    with service.database.transaction() as tx:
        past = utc_now() - timedelta(seconds=1)
        tx.execute(sa.update(deliveries).where(deliveries.c.id == UUID(delivery_id)).values(due_at=past))

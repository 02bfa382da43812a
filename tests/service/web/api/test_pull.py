"""Events that are fetched: given out once a lease, signed as any webhook, settled, and left alone by workers."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
import sqlalchemy as sa
from evalstop_client.signature import verify
from evalstop_service.clock import utc_now
from evalstop_service.store.queue import leases, queues
from evalstop_service.store.tables import deliveries
from evalstop_service.web.pull_waiters import PullWaiters

from tests.service.web.api.conftest import Service

SOON = {"wait_seconds": 0, "limit": 10, "lease_seconds": 30}


@pytest.fixture
def client(service: Service) -> httpx.Client:
    return service.open_client(service.create_project())


def endpoint(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"name": "login-node", "event_types": ["run.stop_requested"], **more}
    answer = client.post("/pull/endpoints", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def stop(client: httpx.Client, name: str = "a run") -> str:
    """A run that is stopped; the id of the decision."""
    run = client.post("/runs", json={"name": name}).json()
    points = [{"metric": "eval", "step": step, "value": -step} for step in range(5)]
    answer = client.post(f"/runs/{run['id']}/observations", json={"observations": points})
    assert answer.json()["verdict"]["verdict"] == "stop", answer.text
    return str(client.get(f"/runs/{run['id']}").json()["decision"]["id"])


def claim(client: httpx.Client, endpoint_id: str, **more: Any) -> list[dict[str, Any]]:
    answer = client.post(f"/pull/endpoints/{endpoint_id}/claim", json={**SOON, **more})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = answer.json()["events"]
    return events


def settle(client: httpx.Client, endpoint_id: str, event: dict[str, Any], status: int, error: str = "") -> bool:
    said = {"delivery_id": event["delivery_id"], "attempt": event["attempt"], "status": status, "error": error}
    answer = client.post(f"/pull/endpoints/{endpoint_id}/settle", json=said)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["settled"])


def delivery(client: httpx.Client, endpoint_id: str) -> dict[str, Any]:
    (found,) = client.get("/deliveries", params={"endpoint_id": endpoint_id}).json()["items"]
    one: dict[str, Any] = found
    return one


def test_event_is_given_out_signed_and_settled(client: httpx.Client) -> None:
    """What is fetched is what would have been sent: the same body, the same headers, delivered once it is settled."""
    made = endpoint(client)
    assert made["url"] == "pull:login-node"
    assert claim(client, made["id"]) == []
    decision_id = stop(client)
    (event,) = claim(client, made["id"])
    assert verify([made["secret"]], event["headers"], event["body"].encode(), time.time())
    assert decision_id in event["body"]
    assert claim(client, made["id"]) == []  # it is leased
    assert settle(client, made["id"], event, 202)
    assert not settle(client, made["id"], event, 202)  # it is settled
    assert claim(client, made["id"]) == []
    found = delivery(client, made["id"])
    assert (found["state"], found["attempts"], found["log"][0]["status_code"]) == ("delivered", 1, 202)


def test_lease_that_ran_out_gives_the_event_to_the_next(client: httpx.Client, service: Service) -> None:
    """A receiver that died keeps nothing: the event comes again under its id, and the old lease settles nothing."""
    made = endpoint(client)
    stop(client)
    (first,) = claim(client, made["id"], lease_seconds=5)
    hasten(service, first["delivery_id"])
    (second,) = claim(client, made["id"])
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["headers"]["webhook-id"] == second["headers"]["webhook-id"]
    assert not settle(client, made["id"], first, 202)
    assert settle(client, made["id"], second, 202)


@pytest.mark.parametrize(("status", "state"), [(401, "waiting"), (503, "waiting"), (422, "dead"), (410, "dead")])
def test_refusals_are_judged_as_those_of_webhooks(client: httpx.Client, status: int, state: str) -> None:
    """What may pass is tried again later, what never will is dead, and 410 ends the endpoint."""
    made = endpoint(client)
    stop(client)
    (event,) = claim(client, made["id"])
    assert settle(client, made["id"], event, status, "so it said")
    found = delivery(client, made["id"])
    assert (found["state"], found["last_error"]) == (state, f"HTTP {status}: so it said")
    assert claim(client, made["id"]) == []
    (listed,) = client.get("/endpoints").json()["items"]
    assert listed["enabled"] is (status != 410)


def test_claim_waits_for_an_event(client: httpx.Client) -> None:
    """A poll is answered when the event comes, not at its end; one in vain comes back empty at its end."""
    made = endpoint(client)
    begun = time.monotonic()
    assert claim(client, made["id"], wait_seconds=0.5) == []
    assert time.monotonic() - begun >= 0.5
    found: list[dict[str, Any]] = []
    poll = threading.Thread(target=lambda: found.extend(claim(client, made["id"], wait_seconds=60)))
    poll.start()
    stop(client)
    poll.join(30)
    assert not poll.is_alive()
    assert len(found) == 1


def test_several_polls_share_what_is_due_and_get_nothing_twice(client: httpx.Client) -> None:
    """At any number of polls at one time an event is in one of the answers."""
    made = endpoint(client)
    for number in range(6):
        stop(client, f"run {number}")
    found: list[str] = []
    polls = [
        threading.Thread(target=lambda: found.extend(one["delivery_id"] for one in claim(client, made["id"], limit=2)))
        for _ in range(4)
    ]
    for poll in polls:
        poll.start()
    for poll in polls:
        poll.join(30)
    found += [one["delivery_id"] for one in claim(client, made["id"])]
    assert len(found) == len(set(found)) == 6


def test_workers_leave_pulled_deliveries_alone(client: httpx.Client, service: Service) -> None:
    """Neither is a worker given what waits for a pull endpoint, nor is it woken for it."""
    made = endpoint(client)
    stop(client)
    with service.database.transaction() as tx:
        now = utc_now() + timedelta(seconds=1)
        mine = UUID(made["id"])
        assert mine not in {one.endpoint_id for one in queues.find_due_deliveries(tx, now, 1_000, 1_000)}
        assert mine not in {one.endpoint_id for one in leases.claim_deliveries(tx, now, 0.0, 1_000, 1_000)}
    assert len(claim(client, made["id"])) == 1


def test_grace_period_is_kept(service: Service) -> None:
    """A stop is given out when its veto window is over, and the decision is requested then; vetoed, it never is."""
    client = service.open_client(service.create_project(veto_window_seconds=3.0))
    made = endpoint(client)
    kept, vetoed = stop(client, "kept"), stop(client, "vetoed")
    assert client.post(f"/decisions/{vetoed}/veto", json={"reason": "no"}).status_code == 200
    assert claim(client, made["id"]) == []
    (event,) = claim(client, made["id"], wait_seconds=20)
    assert kept in event["body"]
    assert client.get(f"/decisions/{kept}").json()["state"] == "requested"
    assert claim(client, made["id"], wait_seconds=0.5) == []


def test_nobody_else_can_fetch(service: Service, client: httpx.Client) -> None:
    """Another project, a key that may not operate and an endpoint that is sent to are all turned away."""
    made = endpoint(client)
    project = service.create_project()
    stranger, reader = (
        service.open_client(project),
        service.open_client(project, "read", "ingest"),
    )
    pushed = stranger.post("/endpoints", json={"url": "http://127.0.0.1:1/"}).json()
    assert stranger.post(f"/pull/endpoints/{made['id']}/claim", json=SOON).status_code == 404
    assert stranger.post(f"/pull/endpoints/{pushed['id']}/claim", json=SOON).status_code == 404
    assert reader.post(f"/pull/endpoints/{made['id']}/claim", json=SOON).status_code == 403
    assert reader.post("/pull/endpoints", json={"name": "x"}).status_code == 403
    assert service.open_client_with_key(None).post(f"/pull/endpoints/{made['id']}/claim", json=SOON).status_code == 401
    said = {"delivery_id": made["id"], "attempt": 1, "status": 200}
    assert client.post(f"/pull/endpoints/{made['id']}/settle", json=said).status_code == 404


def test_disabled_and_deleted_endpoints_give_nothing(client: httpx.Client) -> None:
    """They are changed where all endpoints are."""
    made = endpoint(client)
    stop(client)
    client.patch(f"/endpoints/{made['id']}", json={"enabled": False})
    assert claim(client, made["id"]) == []
    client.patch(f"/endpoints/{made['id']}", json={"enabled": True})
    assert len(claim(client, made["id"])) == 1
    client.delete(f"/endpoints/{made['id']}")
    assert client.post(f"/pull/endpoints/{made['id']}/claim", json=SOON).status_code == 404


def test_poll_that_nobody_waits_for_takes_nothing(service: Service, client: httpx.Client) -> None:
    """A receiver that hung up in the middle of a poll is not given what comes afterwards."""
    made = endpoint(client)
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"/pull/endpoints/{made['id']}/claim", json={**SOON, "wait_seconds": 60}, timeout=0.5)
    time.sleep(1.0)  # more than two looks of the poll
    stop(client)
    assert len(claim(client, made["id"], wait_seconds=5)) == 1


def test_all_that_wait_share_a_look(service: Service, client: httpx.Client) -> None:
    """Receivers that wait at one time look at the database once together, and each hears of its own endpoint."""
    due, idle = UUID(endpoint(client)["id"]), UUID(endpoint(client, name="idle", event_types=["run.lost"])["id"])
    stop(client)
    looks: list[datetime] = []

    def clock() -> datetime:
        looks.append(utc_now())
        return looks[-1]

    async def wait() -> list[bool]:
        waiters = PullWaiters(service.database, clock)
        return await asyncio.gather(*[waiters.wait_for_look(one) for one in (due, idle) * 20])

    assert asyncio.run(wait()) == [True, False] * 20
    assert len(looks) == 1


def hasten(service: Service, delivery_id: str) -> None:
    """Let the lease of a delivery run out."""
    with service.database.transaction() as tx:
        past = utc_now() - timedelta(seconds=1)
        tx.execute(sa.update(deliveries).where(deliveries.c.id == UUID(delivery_id)).values(due_at=past))

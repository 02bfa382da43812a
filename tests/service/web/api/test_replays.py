"""What was sent, sent once more, and a test of an endpoint, over HTTP on both databases."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from standardwebhooks import Webhook

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.webhooks.delivery.fakes import LOOPBACK, FakeEndpoint, Reply, reach

LONG_AGO = "2020-01-01T00:00:00Z"


def deliver(service: Service, until: Callable[[], bool]) -> None:
    """Run a worker until the condition holds."""

    async def run() -> None:
        stop = asyncio.Event()
        async with Sender(5.0, address_policy=LOOPBACK) as sender:
            limits = WorkerLimits(poll_seconds=0.02)
            worker = DeliveryWorker(service.database, sender, clock=utc_now, chance=random.Random(1), limits=limits)
            running = asyncio.create_task(worker.run(stop))
            try:
                await reach(until, running)
            finally:
                stop.set()
                await running

    asyncio.run(run())


def stopped_run(admin: httpx.Client) -> str:
    """A run that the paper's rule has just stopped; the id of its decision."""
    run = expect_json(admin.post("/runs", json={"name": "first", "mode": "enforce"}), 201)
    expect_json(admin.post(f"/runs/{run['id']}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(admin.post(f"/runs/{run['id']}/observations", json={"observations": FALLING}), 200)
    decision: str = expect_json(admin.get("/decisions"), 200)["items"][0]["id"]
    return decision


def all_settled(admin: httpx.Client) -> Callable[[], bool]:
    return lambda: not expect_json(admin.get("/deliveries", params={"state": "waiting"}), 200)["items"]


def test_the_log_of_a_delivery(service: Service, admin: httpx.Client) -> None:
    """A delivery shows what is sent, without a signature, and where each attempt went and what came back."""
    with FakeEndpoint(lambda _request, number: Reply(503 if number == 0 else 200, body=b"thanks")) as fake:
        types = ["run.stop_requested"]
        secret = expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": types}), 201)["secret"]
        stopped_run(admin)
        deliver(service, all_settled(admin))
    (listed,) = expect_json(admin.get("/deliveries"), 200)["items"]
    shown = expect_json(admin.get(f"/deliveries/{listed['id']}"), 200)
    assert [(one["status_code"], one["url"], one["answer"]) for one in shown["log"]] == [
        (503, fake.url, "thanks"),
        (200, fake.url, "thanks"),
    ]
    assert shown["request"]["body"].encode() == fake.received[0].body
    assert shown["request"]["headers"]["webhook-id"] == fake.ids()[0]
    assert "webhook-signature" not in shown["request"]["headers"]
    assert secret not in json.dumps(shown)


def test_a_delivery_is_replayed(service: Service, admin: httpx.Client) -> None:
    """What was delivered can be sent again: a new delivery, under the same id."""
    with FakeEndpoint(Reply()) as fake:
        expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": ["run.stop_requested"]}), 201)
        stopped_run(admin)
        deliver(service, all_settled(admin))
        (past,) = expect_json(admin.get("/deliveries"), 200)["items"]
        again = expect_json(admin.post(f"/deliveries/{past['id']}/replay"), 201)
        assert again["id"] != past["id"]
        assert again["event_id"] == past["event_id"]
        deliver(service, all_settled(admin))
    assert fake.ids() == [past["event_id"]] * 2


def test_a_time_is_replayed(service: Service, admin: httpx.Client) -> None:
    """An endpoint that came late is given what it missed, in order; the answer counts it."""
    stopped_run(admin)
    with FakeEndpoint(Reply()) as fake:
        late = expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": EVERY_EVENT}), 201)
        path = f"/endpoints/{late['id']}/replay"
        done = expect_json(admin.post(path, json={"since": LONG_AGO}), 200)
        assert (done["passed_over"], done["next_after"]) == (0, None)
        assert done["replayed"] >= 2
        deliver(service, all_settled(admin))
        assert len(fake.received) == done["replayed"]
        types = [json.loads(one.body)["type"] for one in fake.received]
        assert "run.stop_requested" in types
        only = expect_json(admin.post(path, json={"since": LONG_AGO, "types": ["run.stop_requested"]}), 200)
        assert only["replayed"] == 1
        assert expect_json(admin.post(path, json={"since": LONG_AGO, "until": LONG_AGO}), 200)["replayed"] == 0
        turned = {"since": LONG_AGO, "until": "1999-01-01T00:00:00Z"}
        assert "before it begins" in expect_problem(admin.post(path, json=turned), 422)["detail"]


def test_a_stop_that_holds_no_longer_is_not_replayed(service: Service) -> None:
    """What a person let go on is not stopped by a replay, be it of a time or of one delivery."""
    admin = service.open_client(service.create_project(veto_window_seconds=3600))
    body = {"url": "http://127.0.0.1:9/", "event_types": ["run.stop_requested"]}
    endpoint = expect_json(admin.post("/endpoints", json=body), 201)
    decision = stopped_run(admin)
    path = f"/endpoints/{endpoint['id']}/replay"
    stops = {"since": LONG_AGO, "types": ["run.stop_requested"]}
    pending = expect_json(admin.post(path, json=stops), 200)
    assert (pending["replayed"], pending["passed_over"]) == (0, 1), "it is within its veto window"
    expect_json(admin.post(f"/decisions/{decision}/veto", json={"actor": "dana", "reason": "broken eval"}), 200)
    (cancelled,) = expect_json(admin.get("/deliveries"), 200)["items"]
    assert expect_json(admin.post(path, json=stops), 200)["replayed"] == 0
    expect_problem(admin.post(f"/deliveries/{cancelled['id']}/replay"), 409)


def test_a_stop_that_was_undone_is_not_retried(service: Service, admin: httpx.Client) -> None:
    """A stop that was refused and then taken back is not sent again by hand."""
    with FakeEndpoint(Reply(400)) as fake:
        expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": ["run.stop_requested"]}), 201)
        decision = stopped_run(admin)
        deliver(service, all_settled(admin))
        (dead,) = expect_json(admin.get("/deliveries"), 200)["items"]
        assert dead["state"] == "dead"
        expect_json(admin.post(f"/decisions/{decision}/undo", json={"actor": "dana", "reason": "broken eval"}), 200)
        expect_problem(admin.post(f"/deliveries/{dead['id']}/retry"), 409)
    assert len(fake.received) == 1


def test_a_stop_of_an_earlier_attempt_is_not_replayed(admin: httpx.Client) -> None:
    """Once the run went on in a new attempt, the stop of the one before is not for it."""
    body = {"url": "http://127.0.0.1:9/", "event_types": ["run.stop_requested"]}
    endpoint = expect_json(admin.post("/endpoints", json=body), 201)
    stopped_run(admin)
    run = expect_json(admin.get("/runs"), 200)["items"][0]
    expect_json(admin.post(f"/runs/{run['id']}/resume", json={"step": 1}), 200)
    stops = {"since": LONG_AGO, "types": ["run.stop_requested"]}
    done = expect_json(admin.post(f"/endpoints/{endpoint['id']}/replay", json=stops), 200)
    assert (done["replayed"], done["passed_over"]) == (0, 1)


@pytest.mark.parametrize("form", ["standard", "slack"])
def test_an_endpoint_is_tried(admin: httpx.Client, form: str) -> None:
    """A test arrives at once, signed and in the endpoint's format, and the answer comes back; it is no delivery."""
    with FakeEndpoint(Reply(202, body=b"got it")) as fake:
        endpoint = expect_json(admin.post("/endpoints", json={"url": fake.url, "format": form}), 201)
        tried = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
    assert (tried["delivered"], tried["status_code"], tried["answer"]) == (True, 202, "got it")
    (received,) = fake.received
    assert received.headers["webhook-id"] == tried["event_id"]
    told: dict[str, Any] = Webhook(endpoint["secret"]).verify(received.body, received.headers)
    assert told["type"] == "endpoint.test" if form == "standard" else "blocks" in told
    assert expect_json(admin.get("/deliveries"), 200)["items"] == []


def test_a_failing_endpoint_is_told_of(admin: httpx.Client) -> None:
    """A test says what went wrong; where nothing is sent, or nothing may be, it is refused."""
    with FakeEndpoint(Reply(500, body=b"oh no")) as fake:
        endpoint = expect_json(admin.post("/endpoints", json={"url": fake.url}), 201)
        tried = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
        assert (tried["delivered"], tried["status_code"], tried["answer"]) == (False, 500, "oh no")
        expect_json(admin.patch(f"/endpoints/{endpoint['id']}", json={"enabled": False}), 200)
        expect_problem(admin.post(f"/endpoints/{endpoint['id']}/test"), 409)
    pulled = expect_json(admin.post("/pull/endpoints", json={"name": "node"}), 201)
    expect_problem(admin.post(f"/endpoints/{pulled['id']}/test"), 409)


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "[fd00:ec2::254]", "2852039166", "[::ffff:10.0.0.1]"])
def test_an_endpoint_inside_is_refused(admin: httpx.Client, host: str) -> None:
    """A URL that leads inside is refused when the endpoint is made or changed, with what would allow it."""
    body = {"url": f"http://{host}/hook"}
    for response in (
        admin.post("/endpoints", json=body),
        admin.patch(
            f"/endpoints/{expect_json(admin.post('/endpoints', json={'url': 'http://127.0.0.1:9/'}), 201)['id']}",
            json=body,
        ),
    ):
        (error,) = expect_problem(response, 422)["errors"]
        assert error["pointer"] == "/url"
        assert "EVALSTOP_WEBHOOK_NETWORKS" in error["detail"]


def test_schemas_are_served(admin: httpx.Client) -> None:
    """Every type of event has a schema at its own address, and all are answered together."""
    admin_and_resources = expect_json(admin.get("/events/schemas"), 200)
    assert expect_json(admin.get("/events/schemas/run.stopped"), 200) == admin_and_resources["run.stopped"]
    expect_problem(admin.get("/events/schemas/run.unheard_of"), 404)

"""Replays of deliveries, and tests of endpoints, over HTTP; endpoints that receive e-mail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from evalstop_service.domain.event_types import EventType
from evalstop_service.store.database import Database
from standardwebhooks import Webhook

from tests.fixtures.projects import EVERY_EVENT
from tests.security.served_project import serve_project
from tests.service.web.api.api_calls import create_decision, expect_json, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.web.api.routes import ENDPOINT
from tests.service.webhooks.delivery.fakes import FakeEndpoint, Reply, deliver_until


def deliver_all(service: Service, admin: httpx.Client) -> None:
    """Run a delivery worker until none of the project's deliveries waits."""

    def none_waits() -> bool:
        return not expect_json(admin.get("/deliveries", params={"state": "waiting"}), 200)["items"]

    asyncio.run(deliver_until(none_waits, service.database))


def test_delivery_shows_its_attempts(service: Service, admin: httpx.Client) -> None:
    """Each attempt is shown with its URL, status and response, and nothing of the secret."""
    with FakeEndpoint(lambda _request, number: Reply(503 if number == 0 else 200, body=b"thanks")) as fake:
        types = ["run.stop_requested"]
        secret = expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": types}), 201)["secret"]
        create_decision(admin)
        deliver_all(service, admin)
    (item,) = expect_json(admin.get("/deliveries"), 200)["items"]
    delivery = expect_json(admin.get(f"/deliveries/{item['id']}"), 200)
    assert [(attempt["status_code"], attempt["url"], attempt["answer"]) for attempt in delivery["log"]] == [
        (503, fake.url, "thanks"),
        (200, fake.url, "thanks"),
    ]
    assert secret not in json.dumps(delivery)


def test_replay_of_a_delivery_repeats_the_event(service: Service, admin: httpx.Client) -> None:
    """The replay is a new delivery of the same event."""
    with FakeEndpoint(Reply()) as fake:
        expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": ["run.stop_requested"]}), 201)
        create_decision(admin)
        deliver_all(service, admin)
        (first,) = expect_json(admin.get("/deliveries"), 200)["items"]
        replayed = expect_json(admin.post(f"/deliveries/{first['id']}/replay"), 201)
        assert replayed["id"] != first["id"]
        assert replayed["event_id"] == first["event_id"]
        deliver_all(service, admin)
    assert fake.webhook_ids() == [first["event_id"]] * 2


def test_undone_stop_is_not_sent_again(service: Service, admin: httpx.Client) -> None:
    """A dead delivery of a stop that was undone cannot be replayed."""
    with FakeEndpoint(Reply(400)) as fake:
        expect_json(admin.post("/endpoints", json={"url": fake.url, "event_types": ["run.stop_requested"]}), 201)
        decision = create_decision(admin)
        deliver_all(service, admin)
        (dead,) = expect_json(admin.get("/deliveries"), 200)["items"]
        assert dead["state"] == "dead"
        expect_json(admin.post(f"/decisions/{decision}/undo", json={"reason": "broken eval"}), 200)
        expect_problem(admin.post(f"/deliveries/{dead['id']}/replay"), 409)
    assert len(fake.received) == 1


def test_stop_of_an_earlier_attempt_is_not_replayed(admin: httpx.Client) -> None:
    """After a resume the stop of the previous attempt is not sent again."""
    body = {"url": "http://127.0.0.1:9/", "event_types": ["run.stop_requested"]}
    expect_json(admin.post("/endpoints", json=body), 201)
    create_decision(admin)
    (stop,) = expect_json(admin.get("/deliveries"), 200)["items"]
    expect_json(admin.post(f"/deliveries/{stop['id']}/replay"), 201)
    run = expect_json(admin.get("/runs"), 200)["items"][0]
    expect_json(admin.post(f"/runs/{run['id']}/resume", json={"step": 1}), 200)
    expect_problem(admin.post(f"/deliveries/{stop['id']}/replay"), 409)


@pytest.mark.parametrize("format_name", ["standard", "slack"])
def test_endpoint_test_is_signed_and_returns_the_response(admin: httpx.Client, format_name: str) -> None:
    """The test is sent at once in the endpoint's format, and adds no delivery."""
    with FakeEndpoint(Reply(202, body=b"got it")) as fake:
        endpoint = expect_json(admin.post("/endpoints", json={"url": fake.url, "format": format_name}), 201)
        result = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
    assert (result["delivered"], result["status_code"], result["answer"]) == (True, 202, "got it")
    (received,) = fake.received
    assert received.headers["webhook-id"] == result["event_id"]
    body: dict[str, Any] = Webhook(endpoint["secret"]).verify(received.body, received.headers)
    assert body["type"] == "endpoint.test" if format_name == "standard" else set(body) == {"text"}
    assert expect_json(admin.get("/deliveries"), 200)["items"] == []


def test_failed_endpoint_test_returns_the_error(admin: httpx.Client) -> None:
    """A disabled endpoint and a pull endpoint cannot be tested."""
    with FakeEndpoint(Reply(500, body=b"oh no")) as fake:
        endpoint = expect_json(admin.post("/endpoints", json={"url": fake.url}), 201)
        result = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
        assert (result["delivered"], result["status_code"], result["answer"]) == (False, 500, "oh no")
        expect_json(admin.patch(f"/endpoints/{endpoint['id']}", json={"enabled": False}), 200)
        expect_problem(admin.post(f"/endpoints/{endpoint['id']}/test"), 409)
    pull_endpoint = expect_json(admin.post("/pull/endpoints", json={"name": "node"}), 201)
    expect_problem(admin.post(f"/endpoints/{pull_endpoint['id']}/test"), 409)


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "[fd00:ec2::254]", "2852039166", "[::ffff:10.0.0.1]"])
def test_endpoint_with_a_private_address_is_refused(admin: httpx.Client, host: str) -> None:
    """Creating and changing an endpoint name the setting that would allow the address."""
    body = {"url": f"http://{host}/hook"}
    for response in (
        admin.post("/endpoints", json=body),
        admin.patch(
            f"/endpoints/{expect_json(admin.post('/endpoints', json={'url': 'http://127.0.0.1:9/'}), 201)['id']}",
            json=body,
        ),
    ):
        detail = expect_problem(response, 422)["detail"]
        assert detail.startswith("url: ")
        assert "EVALSTOP_WEBHOOK_NETWORKS" in detail


def test_event_schemas_are_served(admin: httpx.Client) -> None:
    """Each event type has a schema."""
    assert expect_json(admin.get("/events/schemas"), 200).keys() == set(EventType)


@pytest.mark.parametrize("url", ["mailto:ops@example.org", "mailto:owner"])
def test_email_endpoint_is_created_and_tested(admin: httpx.Client, url: str) -> None:
    """It is listed and audited by its address, and its test says that no mail server is configured."""
    endpoint = expect_json(admin.post("/endpoints", json=ENDPOINT | {"url": url, "format": "email"}), 201)
    assert endpoint["url"] == url
    assert expect_json(admin.get("/audit"), 200)["items"][0]["details"]["host"] == url
    tested = expect_json(admin.post(f"/endpoints/{endpoint['id']}/test"), 200)
    assert (tested["delivered"], tested["error"]) == (False, "not sent: EVALSTOP_SMTP_HOST is not set")
    expect_problem(admin.patch(f"/endpoints/{endpoint['id']}", json={"format": "slack"}), 422)
    assert expect_json(admin.get("/endpoints"), 200)["items"][0]["format"] == "email"


@pytest.mark.parametrize(
    "invalid",
    [
        {"url": "mailto:ops@example.org", "format": "standard"},
        {"url": "https://93.184.216.34/", "format": "email"},
        {"url": "mailto:ops@example.org,lee@example.org", "format": "email"},
        {"url": "mailto:ops@example.org?cc=lee@example.org", "format": "email"},
        {"url": "mailto:Ops <ops@example.org>", "format": "email"},
        {"url": "mailto:", "format": "email"},
    ],
)
def test_mismatched_address_and_format_is_refused(admin: httpx.Client, invalid: dict[str, str]) -> None:
    """The URL must be one plain address with the format `email`, and no other combination."""
    expect_problem(admin.post("/endpoints", json=ENDPOINT | invalid), 422)


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

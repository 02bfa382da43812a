"""Whatever is sent again by hand is what the endpoint subscribes to: an old stop never reaches who did not ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.web.api.api_calls import ENDPOINT, FALLING, expect_json, expect_problem

SINCE = {"since": "2020-01-01T00:00:00Z"}


@contextmanager
def connected(database: Database) -> Iterator[httpx.Client]:
    create_project(database, "p", "enforce", 0.0, utc_now(), "paper")
    key = api_keys.create_named_key(database, "p", "k", ["admin"], utc_now())[1]
    headers = {"Authorization": f"Bearer {key}"}
    with (
        start_server(database) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False) as client,
    ):
        yield client


def stop_a_run(client: httpx.Client) -> None:
    run = expect_json(client.post("/runs", json={"name": "r"}), 201)["id"]
    expect_json(client.post(f"/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(client.post(f"/runs/{run}/observations", json={"observations": FALLING}), 200)


def add_endpoint(client: httpx.Client, *event_types: str) -> str:
    endpoint = expect_json(client.post("/endpoints", json=ENDPOINT | {"event_types": event_types}), 201)
    return str(endpoint["id"])


def list_types(client: httpx.Client, endpoint_id: str) -> set[str]:
    found = expect_json(client.get("/deliveries"), 200)["items"]
    return {one["event_type"] for one in found if one["endpoint_id"] == endpoint_id}


def test_a_replay_sends_what_the_endpoint_subscribes_to(database: Database) -> None:
    """A replay of everything, and one that names a stop, send nothing that the endpoint does not want."""
    with connected(database) as client:
        wanting = add_endpoint(client, *EVERY_EVENT)
        stop_a_run(client)
        assert "run.stop_requested" in list_types(client, wanting)
        other = add_endpoint(client, "run.best_checkpoint_changed")
        assert expect_json(client.post(f"/endpoints/{other}/replay", json=SINCE), 200)["replayed"] > 0
        assert list_types(client, other) == {"run.best_checkpoint_changed"}
        named = SINCE | {"types": ["run.stop_requested"]}
        assert expect_json(client.post(f"/endpoints/{other}/replay", json=named), 200)["replayed"] == 0
        assert expect_json(client.post(f"/endpoints/{wanting}/replay", json=named), 200)["replayed"] == 1


def test_a_delivery_is_not_repeated_to_who_no_longer_subscribes(database: Database) -> None:
    """An endpoint that gave up a type of event is not sent one of it again."""
    with connected(database) as client:
        endpoint = add_endpoint(client, *EVERY_EVENT)
        stop_a_run(client)
        deliveries = expect_json(client.get("/deliveries"), 200)["items"]
        stop = next(one["id"] for one in deliveries if one["event_type"] == "run.stop_requested")
        expect_json(client.patch(f"/endpoints/{endpoint}", json={"event_types": ["run.stopped"]}), 200)
        assert "subscribe" in expect_problem(client.post(f"/deliveries/{stop}/replay"), 409)["detail"]


def test_what_ends_a_job_is_signed_for_receivers_alone(database: Database) -> None:
    """Who asks for all events is told of the run and sent no stop; who names stops, or reads a chat, gets them."""
    with connected(database) as client:
        observer, receiver = add_endpoint(client, "*"), add_endpoint(client, "run.stop_requested")
        chat = expect_json(client.post("/endpoints", json=ENDPOINT | {"event_types": ["*"], "format": "slack"}), 201)[
            "id"
        ]
        stop_a_run(client)
        assert "run.best_checkpoint_changed" in list_types(client, observer)
        assert "run.stop_requested" not in list_types(client, observer)
        assert list_types(client, receiver) == {"run.stop_requested"}
        assert "run.stop_requested" in list_types(client, chat)
        named = SINCE | {"types": ["run.stop_requested"]}
        assert expect_json(client.post(f"/endpoints/{observer}/replay", json=named), 200)["replayed"] == 0

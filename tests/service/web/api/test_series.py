"""A metric's series at a chosen resolution, over HTTP."""

from __future__ import annotations

import uuid

import pytest
from evalstop_service.store import series

from tests.service.web.api.conftest import Service

OBSERVATION_COUNT = 2 * series.OBSERVATIONS_AT_A_TIME + 100


def test_buckets_contain_every_observation(service: Service) -> None:
    """Spikes and non-finite values of a long series are in some bucket."""
    client = service.open_client(service.create_project())
    run_id = client.post("/runs", json={"name": "long"}).json()["id"]
    for start in range(0, OBSERVATION_COUNT, 8000):
        points = [
            {"metric": "tokens", "step": step, "value": 9.0 if step == 7777 else "NaN" if step == 5 else 0.5}
            for step in range(start, min(start + 8000, OBSERVATION_COUNT))
        ]
        assert client.post(f"/runs/{run_id}/observations", json={"observations": points}).status_code == 200
    for _ in range(2):
        answer = client.get(f"/runs/{run_id}/series", params={"metric": "tokens", "buckets": 20})
        assert answer.status_code == 200
        buckets = answer.json()["buckets"]
        assert len(buckets) == 20
        assert sum(bucket["count"] for bucket in buckets) == OBSERVATION_COUNT
        assert [bucket["highest"] for bucket in buckets].count(9.0) == 1
        assert (buckets[0]["nan_count"], buckets[0]["lowest"], buckets[0]["first_step"]) == (1, 0.5, 0)
        assert (buckets[-1]["last"], buckets[-1]["last_step"]) == (0.5, OBSERVATION_COUNT - 1)
    part = client.get(f"/runs/{run_id}/series", params={"metric": "tokens", "from": 5, "to": 6, "buckets": 9})
    assert [bucket["last"] for bucket in part.json()["buckets"]] == ["NaN", 0.5]
    assert client.get(f"/runs/{run_id}/series", params={"metric": "other"}).json() == {"metric": "other", "buckets": []}


@pytest.mark.parametrize("invalid", [{"buckets": 0}, {"buckets": 2001}, {"from": -1}, {"to": 2**53}, {"metric": ""}])
def test_invalid_parameter_is_refused_by_name(service: Service, invalid: dict[str, int | str]) -> None:
    """A parameter out of range is a 422 whose pointer names it."""
    client = service.open_client(service.create_project())
    parameters: dict[str, int | str] = {"metric": "tokens"}
    answer = client.get(f"/runs/{uuid.uuid4()}/series", params=parameters | invalid)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].endswith(next(iter(invalid)))

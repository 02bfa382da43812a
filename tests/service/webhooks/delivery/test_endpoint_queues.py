"""The in-memory queues of a worker: which delivery starts next, and how many more are claimed."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from uuid import UUID

from evalstop_service.store.ids import new_id
from evalstop_service.store.queue.attempts import ClaimedDelivery
from evalstop_service.webhooks.delivery.claims import EndpointQueues
from hypothesis import given
from hypothesis import strategies as st

from tests.service.webhooks.delivery.fakes import EPOCH

ENDPOINTS = [new_id() for _ in range(3)]


def build_claimed_delivery(endpoint: UUID) -> ClaimedDelivery:
    lease_until = EPOCH + timedelta(minutes=1)
    return ClaimedDelivery(
        new_id(), new_id(), new_id(), endpoint, 1, EPOCH, "http://x.example", "{}", lease_until=lease_until
    )


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["claim", "begin", "end"]), st.integers(0, 2), st.booleans()), max_size=80),
)
def test_queues_keep_their_limits(
    concurrency: int, per_endpoint: int, ahead: int, actions: list[tuple[str, int, bool]]
) -> None:
    """Running and waiting deliveries never exceed the limits, in all and per endpoint, and none is lost."""
    queues = EndpointQueues(concurrency, per_endpoint, ahead)
    running: list[ClaimedDelivery] = []
    waiting: list[ClaimedDelivery] = []
    for action, index, accepted in actions:
        if action == "claim":
            endpoint = ENDPOINTS[index]
            room = min(queues.claim_limit(), queues.claim_limits_by_endpoint().get(endpoint, per_endpoint))
            claimed = [build_claimed_delivery(endpoint) for _ in range(room)]
            queues.add_claimed(claimed)
            waiting += claimed
        elif action == "begin":
            if (delivery := queues.start_next()) is not None:
                waiting.remove(delivery)
                running.append(delivery)
        elif running:
            queues.finish_attempt(running.pop(index % len(running)), accepted)
        counts = Counter(delivery.endpoint_id for delivery in running)
        assert queues.running == len(running) <= concurrency
        assert all(count <= per_endpoint for count in counts.values())
        assert len(running) + len(waiting) <= concurrency * (1 + ahead)
        assert queues.claim_limit() >= 0
    assert sorted(delivery.id for delivery in queues.remove_all_waiting()) == sorted(
        delivery.id for delivery in waiting
    )
    assert queues.start_next() is None


def test_endpoints_take_turns() -> None:
    """A long queue of one endpoint does not keep another endpoint waiting."""
    queues = EndpointQueues(10, 10, 4)
    long, short = ENDPOINTS[:2]
    queues.add_claimed([build_claimed_delivery(long) for _ in range(6)] + [build_claimed_delivery(short)])
    started = [queues.start_next() for _ in range(3)]
    assert [started_delivery.endpoint_id for started_delivery in started if started_delivery is not None] == [
        long,
        short,
        long,
    ]


def test_claims_ahead_only_for_accepting_endpoints() -> None:
    """More than can start is claimed for an endpoint that accepted its last event, and for no other."""
    queues = EndpointQueues(8, 2, 3)
    healthy, failing = ENDPOINTS[:2]
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (8, {})
    queues.add_claimed(
        [
            build_claimed_delivery(healthy),
            build_claimed_delivery(healthy),
            build_claimed_delivery(failing),
            build_claimed_delivery(failing),
        ]
    )
    started = [delivery for delivery in (queues.start_next() for _ in range(4)) if delivery is not None]
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (4, {healthy: 0, failing: 0})
    for started_delivery in started[:2]:
        queues.finish_attempt(started_delivery, accepted=started_delivery.endpoint_id == healthy)
    assert queues.claim_limit() == 8 * 4 - 2
    assert queues.claim_limits_by_endpoint() == {healthy: 2 * 4 - 1, failing: 1}
    queues.add_claimed([build_claimed_delivery(healthy) for _ in range(7)])
    assert [queues.start_next() is not None for _ in range(2)] == [True, False], "one delivery is still running"
    assert queues.claim_limits_by_endpoint() == {healthy: 0, failing: 1}


def test_claiming_ahead_ends_when_nothing_is_claimed() -> None:
    """An endpoint is claimed ahead for until a claim finds nothing for it."""
    queues = EndpointQueues(2, 2, 3)
    queues.add_claimed([build_claimed_delivery(ENDPOINTS[0])])
    started = queues.start_next()
    assert started is not None
    queues.finish_attempt(started, accepted=True)
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (8, {ENDPOINTS[0]: 8})
    queues.add_claimed([])
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (2, {})


def test_waiting_deliveries_of_one_endpoint_are_removed() -> None:
    """Waiting deliveries of one endpoint can be removed; other endpoints go on, and it can be added again."""
    queues = EndpointQueues(concurrency=4, per_endpoint=1, ahead=2)
    first, second = ENDPOINTS[:2]
    first_deliveries = [build_claimed_delivery(first) for _ in range(3)]
    queues.add_claimed([*first_deliveries, build_claimed_delivery(second)])
    started = queues.start_next()
    assert started == first_deliveries[0]
    assert queues.remove_waiting(first) == first_deliveries[1:]
    assert queues.remove_waiting(first) == []
    assert queues.claim_limit() == 2, "one is running, and that of the other endpoint waits"
    following = queues.start_next()
    assert following is not None
    assert following.endpoint_id == second
    queues.finish_attempt(first_deliveries[0], accepted=False)
    queues.add_claimed([first_deliveries[1]])
    assert queues.start_next() == first_deliveries[1]

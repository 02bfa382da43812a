"""The queues: what is begun, in whose turn, and how much more is claimed."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from uuid import UUID

from evalstop_service.store.ids import new_id
from evalstop_service.store.queue.attempts import ClaimedDelivery
from evalstop_service.webhooks.delivery.endpoint_queues import EndpointQueues
from hypothesis import given
from hypothesis import strategies as st

from tests.service.webhooks.delivery.fakes import EPOCH

ENDPOINTS = [new_id() for _ in range(3)]


def claimed(endpoint: UUID) -> ClaimedDelivery:
    lease_until = EPOCH + timedelta(minutes=1)
    return ClaimedDelivery(new_id(), new_id(), new_id(), endpoint, 1, EPOCH, lease_until, "http://x.example", (), "{}")


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["claim", "begin", "end"]), st.integers(0, 2), st.booleans()), max_size=80),
)
def test_keeps_within_its_bounds(
    concurrency: int, per_endpoint: int, ahead: int, acts: list[tuple[str, int, bool]]
) -> None:
    """Whatever happens, no more is under way than allowed, in all and to one endpoint, nothing is lost, and who claims
    what the queues asks for never holds more than it may."""
    queues = EndpointQueues(concurrency, per_endpoint, ahead)
    under_way: list[ClaimedDelivery] = []
    waiting: list[ClaimedDelivery] = []
    for act, which, prompt in acts:
        if act == "claim":
            endpoint = ENDPOINTS[which]
            room = min(queues.claim_limit(), queues.claim_limits_by_endpoint().get(endpoint, per_endpoint))
            taken = [claimed(endpoint) for _ in range(room)]
            queues.add_claimed(taken)
            waiting += taken
        elif act == "begin":
            if (one := queues.start_next()) is not None:
                waiting.remove(one)
                under_way.append(one)
        elif under_way:
            queues.finish_attempt(under_way.pop(which % len(under_way)), prompt)
        counts = Counter(one.endpoint_id for one in under_way)
        assert queues.running == len(under_way) <= concurrency
        assert all(count <= per_endpoint for count in counts.values())
        assert len(under_way) + len(waiting) <= concurrency * (1 + ahead)
        assert queues.claim_limit() >= 0
    assert sorted(one.id for one in queues.remove_all_waiting()) == sorted(one.id for one in waiting)
    assert queues.start_next() is None


def test_endpoints_take_turns() -> None:
    """A long queue of one endpoint does not keep another waiting."""
    queues = EndpointQueues(10, 10, 4)
    long, short = ENDPOINTS[:2]
    queues.add_claimed([claimed(long) for _ in range(6)] + [claimed(short)])
    begun = [queues.start_next() for _ in range(3)]
    assert [one.endpoint_id for one in begun if one is not None] == [long, short, long]


def test_claims_ahead_for_the_prompt() -> None:
    """More than can begin is claimed for an endpoint that took its last event, and for no other."""
    queues = EndpointQueues(8, 2, 3)
    fine, failing = ENDPOINTS[:2]
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (8, {})
    queues.add_claimed([claimed(fine), claimed(fine), claimed(failing), claimed(failing)])
    begun = [one for one in (queues.start_next() for _ in range(4)) if one is not None]
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (4, {fine: 0, failing: 0})
    for one in begun[:2]:
        queues.finish_attempt(one, accepted=one.endpoint_id == fine)
    assert queues.claim_limit() == 8 * 4 - 2
    assert queues.claim_limits_by_endpoint() == {fine: 2 * 4 - 1, failing: 1}
    queues.add_claimed([claimed(fine) for _ in range(7)])
    assert [queues.start_next() is not None for _ in range(2)] == [True, False], "one was under way already"
    assert queues.claim_limits_by_endpoint() == {fine: 0, failing: 1}


def test_remembers_the_prompt_until_the_next_claim() -> None:
    """An endpoint that took all it was sent is claimed ahead for, and is a stranger once nothing was claimed for it."""
    queues = EndpointQueues(2, 2, 3)
    queues.add_claimed([claimed(ENDPOINTS[0])])
    begun = queues.start_next()
    assert begun is not None
    queues.finish_attempt(begun, accepted=True)
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (8, {ENDPOINTS[0]: 8})
    queues.add_claimed([])
    assert (queues.claim_limit(), queues.claim_limits_by_endpoint()) == (2, {})


def test_gives_up_one_endpoint() -> None:
    """What is at hand for an endpoint that is left alone is given up; other endpoints go on, and it may come again."""
    queues = EndpointQueues(concurrency=4, per_endpoint=1, ahead=2)
    first, second = ENDPOINTS[:2]
    mine = [claimed(first) for _ in range(3)]
    queues.add_claimed([*mine, claimed(second)])
    begun = queues.start_next()
    assert begun == mine[0]
    assert queues.remove_waiting(first) == mine[1:]
    assert queues.remove_waiting(first) == []
    following = queues.start_next()
    assert following is not None
    assert following.endpoint_id == second
    queues.finish_attempt(mine[0], accepted=False)
    queues.add_claimed([mine[1]])
    assert queues.start_next() == mine[1]

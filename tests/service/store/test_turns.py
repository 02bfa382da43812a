"""The order in which transactions get their turn to write."""

from __future__ import annotations

import threading

from evalstop_service.store.turns import WORK, Turns, Work

from tests.service.concurrency import count_waiting, wait_until


def test_decisions_go_first_and_projects_take_turns() -> None:
    """Whoever waits is served in this order: decisions, then one of each project after the other."""
    turns, served = Turns(), list[str]()

    def write(name: str, work: Work) -> None:
        WORK.set(work)
        with turns.take():
            served.append(name)

    works = {f"a{number}": Work("key", "a") for number in range(3)} | {
        "b": Work("key", "b"),
        "veto": Work("key", "b", is_decision=True),
        "none": Work(),
    }
    threads = []
    with turns.take():
        for waiting_count, (name, work) in enumerate(works.items(), start=1):
            threads.append(threading.Thread(target=write, args=(name, work)))
            threads[-1].start()
            wait_until(lambda waiting_count=waiting_count: count_waiting(turns) == waiting_count)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert served == ["veto", "a0", "b", "none", "a1", "a2"]
    with turns.take():
        assert count_waiting(turns) == 0

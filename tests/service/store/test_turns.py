"""The order in which transactions get their turn to write."""

from __future__ import annotations

import threading

from evalstop_service.store.database import WORK, Turns, Work

from tests.service.concurrency import count_waiting, wait_until


def test_decisions_go_first() -> None:
    """Decisions are served first, and among equals whoever came first."""
    turns, served = Turns(), list[str]()

    def write(name: str, work: Work) -> None:
        WORK.set(work)
        with turns.take():
            served.append(name)

    works = {"a": Work("key", "a"), "b": Work("key", "b"), "veto": Work("key", "b", is_decision=True), "none": Work()}
    threads = []
    with turns.take():
        for waiting_count, (name, work) in enumerate(works.items(), start=1):
            threads.append(threading.Thread(target=write, args=(name, work)))
            threads[-1].start()
            wait_until(lambda waiting_count=waiting_count: count_waiting(turns) == waiting_count)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert served == ["veto", "a", "b", "none"]
    with turns.take():
        assert count_waiting(turns) == 0

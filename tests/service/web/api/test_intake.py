"""Taking a stream in: the same however it is cut, no more read than can be stored, and exact about what was stored."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import msgspec
import pytest
import sqlalchemy as sa
from evalstop_service.errors import Closed, Overloaded
from evalstop_service.web.api.reading.decompression import unpacker
from evalstop_service.web.api.reading.json_lines import MOST_LINE_BYTES
from evalstop_service.web.api.reading.stream import MOST_RUNS, Intake, StreamLimits
from evalstop_service.web.api.reading.stream_result import MOST_ERRORS
from evalstop_service.web.problems import Problem
from hypothesis import given
from hypothesis import strategies as st

from tests.service.web.api.fake_committer import NOW, FakeCommitter
from tests.service.web.api.test_unpacking import PACKED

RUNS = [UUID(int=number) for number in range(1, 4)]
UNKNOWN = UUID(int=99)
DEADLINE_SECONDS = 30.0

points = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["eval", "loss", "ü"]),
        "step": st.integers(0, 3),
        "value": st.sampled_from([0.5, 1, 2.0, "NaN", "Infinity"]),
    },
    optional={"stderr": st.just(0.1), "time": st.just("2026-01-01T00:00:00Z")},
)
told = st.tuples(st.sampled_from([*RUNS, UNKNOWN]), st.lists(points, min_size=1, max_size=3), st.booleans())
garbage = st.sampled_from(
    [b"oops", b"{}", b"[]", b'"\xff"', b"[" * 2000, b"x" * (MOST_LINE_BYTES + 1), b'{"run_id": 1}', b"null", b"\x00"]
)
blank = st.sampled_from([b"", b" ", b"\r"])


def line_of(run_id: UUID, point: dict[str, Any]) -> bytes:
    return json.dumps({"run_id": str(run_id)} | point, separators=(",", ":"), ensure_ascii=False).encode()


def batch_of(run_id: UUID, batch: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"run_id": str(run_id), "observations": batch}).encode()


async def parts_of(body: bytes, places: Sequence[int]) -> AsyncIterator[bytes]:
    for begin, end in pairwise([0, *sorted(place % (len(body) + 1) for place in places), len(body)]):
        yield body[begin:end]
        await asyncio.sleep(0)


async def taken(
    committer: FakeCommitter, body: AsyncIterator[bytes], encoding: str = "", **limits: Any
) -> tuple[dict[str, Any], Problem | None]:
    """The tally of a stream, and why it broke off."""
    unpack = unpacker(encoding)
    assert unpack is not None
    intake, broken = Intake(committer, UUID(int=1), StreamLimits(**limits)), None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await intake.take(body, unpack)
    except Problem as problem:
        broken = problem
    return msgspec.to_builtins(intake.tally.result(NOW)), broken


def take(
    body: bytes, places: Sequence[int] = (), encoding: str = "", committer: FakeCommitter | None = None, **limits: Any
) -> tuple[dict[str, Any], Problem | None]:
    committer = committer or FakeCommitter(set(RUNS))
    return asyncio.run(taken(committer, parts_of(body, places), encoding, **limits))


@given(
    written=st.lists(told | garbage | blank, max_size=12),
    places=st.lists(st.integers(0, 10**7), max_size=8),
    encoding=st.sampled_from(sorted(PACKED)),
    gathered=st.integers(1, 5),
    ended=st.booleans(),
)
def test_any_cutting(
    written: list[tuple[UUID, list[dict[str, Any]], bool] | bytes],
    places: list[int],
    encoding: str,
    gathered: int,
    ended: bool,
) -> None:
    """However a stream is cut and packed, what is stored and answered is what a dictionary says, line by line."""
    lines: list[bytes] = []
    values: dict[tuple[UUID, str, int], float] = {}
    errors: list[tuple[int, str]] = []
    runs: dict[str, int] = {}
    accepted = duplicates = 0
    for item in written:
        if isinstance(item, bytes):
            lines.append(item)
            if item.strip():
                errors.append((len(lines), "The line is"))
            continue
        run_id, batch, together = item
        for some in [batch] if together else [[point] for point in batch]:
            lines.append(batch_of(run_id, some) if together else line_of(run_id, some[0]))
            if run_id == UNKNOWN:
                errors.append((len(lines), "Not found"))
                continue
            runs.setdefault(str(run_id), 0)
            for point in some:
                value = float(point["value"])
                identity = (run_id, point["metric"], point["step"])
                if identity not in values:
                    values[identity] = value
                    accepted += 1
                    runs[str(run_id)] += 1
                elif values[identity] == value or (math.isnan(values[identity]) and math.isnan(value)):
                    duplicates += 1
                else:
                    errors.append((len(lines), "Conflict"))
    body = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    committer = FakeCommitter(set(RUNS))
    tally, broken = take(PACKED[encoding](body), places, encoding, committer, gathered=gathered)
    assert broken is None
    assert repr(sorted(committer.values.items())) == repr(sorted(values.items()))
    assert tally["accepted"] == accepted
    assert tally["duplicates"] == duplicates
    assert tally["conflict_count"] == sum(title == "Conflict" for _, title in errors)
    assert tally["error_count"] == len(errors)
    found = [(error["line"], error["title"]) for error in tally["errors"]]
    assert [line for line, _ in found] == [line for line, _ in errors]
    assert all(title.startswith(start) for (_, title), (_, start) in zip(found, errors, strict=True))
    assert [(run["run_id"], run["accepted"]) for run in tally["runs"]] == list(runs.items())
    assert tally["lines"] == (len(lines) if ended or not lines or lines[-1] else len(lines) - 1)


def numbered(run_id: UUID, count: int, start: int = 0) -> list[bytes]:
    return [line_of(run_id, {"metric": "loss", "step": step, "value": 0.5}) for step in range(start, start + count)]


def test_reads_no_more_than_can_be_stored() -> None:
    """While nothing can be stored, a sender without end is read up to the limit, and on as there is room."""
    most = 500
    read = 0

    async def without_end(until: asyncio.Event) -> AsyncIterator[bytes]:
        nonlocal read
        while not until.is_set():
            read += 10
            yield b"\n".join(numbered(RUNS[read % 3], 10, read)) + b"\n"

    async def scenario() -> None:
        committer = FakeCommitter(set(RUNS), open=asyncio.Event())
        assert committer.open is not None
        enough = asyncio.Event()
        taking = asyncio.create_task(taken(committer, without_end(enough), gathered=most))
        before = -1
        while read > before or committer.under_way == 0:  # until nothing more is read
            before = read
            for _ in range(1000):
                await asyncio.sleep(0)
        assert committer.under_way + most <= read < committer.under_way + most + 20
        committer.open.set()
        while read < 10_000:
            await asyncio.sleep(0)
        enough.set()
        tally, broken = await taking
        assert broken is None
        assert tally["accepted"] == len(committer.values) == read
        assert max(size for _, size in committer.messages) < most + 20

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_SECONDS))


def test_order_within_a_run() -> None:
    """Of one run only one arrival is under way at a time, in the order sent: the first of two values stands."""
    lines = [line_of(RUNS[0], {"metric": "eval", "step": 1, "value": value}) for value in range(50)]
    committer = FakeCommitter(set(RUNS))
    tally, _ = take(b"\n".join(lines), range(0, 5000, 40), committer=committer, gathered=3)
    assert committer.values == {(RUNS[0], "eval", 1): 0.0}
    assert len(committer.messages) > 5
    assert [error["line"] for error in tally["errors"]] == list(range(2, 51))


def test_overload_is_waited_out() -> None:
    """When too much waits in the service, the sender waits too, and hears nothing of it."""
    committer = FakeCommitter(set(RUNS), failures=[Overloaded(), Overloaded(), Overloaded()])
    tally, broken = take(b"\n".join(numbered(RUNS[0], 10)), committer=committer)
    assert broken is None
    assert tally["accepted"] == 10


AWAY: dict[str, Callable[[], Exception]] = {
    "overloaded for too long": Overloaded,
    "going down": Closed,
    "the database is away": lambda: sa.exc.OperationalError("SELECT", {}, Exception("gone")),
}


@pytest.mark.parametrize("name", AWAY)
def test_what_breaks_off(name: str) -> None:
    """When nothing can be stored any more the stream ends, and says up to which line it was taken in."""
    committer = FakeCommitter(set(RUNS))

    async def first_then_not() -> AsyncIterator[bytes]:
        yield b"\n".join(numbered(RUNS[0], 10)) + b"\n"
        while len(committer.values) < 10:
            await asyncio.sleep(0)
        committer.failures = [AWAY[name]() for _ in range(100)]
        for start in range(10, 10_000, 10):
            yield b"\n".join(numbered(RUNS[1], 10, start)) + b"\n"
            await asyncio.sleep(0)

    tally, broken = asyncio.run(taken(committer, first_then_not(), wait_seconds=0.0))
    assert broken is not None
    assert broken.status == 503
    assert "nothing was stored" not in broken.detail.lower()
    assert tally["lines"] == tally["accepted"] == 10
    assert tally["error_count"] == 0


def test_a_fault_costs_its_own_lines() -> None:
    """What the service itself cannot cope with is told by its lines; the others are stored."""
    committer = FakeCommitter(set(RUNS), failures=[RuntimeError("a fault")])
    body = b"\n".join([*numbered(RUNS[0], 2), *numbered(RUNS[1], 2), b"", *numbered(RUNS[2], 2)])
    tally, broken = take(body, committer=committer)
    assert broken is None
    assert tally["accepted"] == 4
    assert [(error["line"], error["title"]) for error in tally["errors"]] == [
        (1, "The service failed"),
        (2, "The service failed"),
    ]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(lost=st.integers(1, 10**6))
def test_cut_off(encoding: str, lost: int) -> None:
    """Of a packed stream that breaks off, the lines that came whole are stored; all of it can be sent again."""
    lines = numbered(RUNS[0], 20)
    packed = PACKED[encoding](b"\n".join(lines))
    committer = FakeCommitter(set(RUNS))
    tally, broken = take(packed[: -(1 + lost % len(packed))], encoding=encoding, committer=committer)
    assert broken is not None
    assert broken.status == 400
    stored = tally["lines"]
    assert stored == tally["accepted"] == len(committer.values) < 20
    again, broken = take(packed, encoding=encoding, committer=committer)
    assert broken is None
    assert (again["duplicates"], again["accepted"]) == (stored, 20 - stored)


def test_too_large() -> None:
    """A stream may not be larger than the limit, unpacked; what came within it is stored."""
    lines = numbered(RUNS[0], 3000)
    body = b"\n".join(lines)
    for encoding, pack in PACKED.items():
        tally, broken = take(pack(body), encoding=encoding, stream_bytes=len(body))
        assert broken is None
        tally, broken = take(pack(body), range(0, len(body), 10_000), encoding, stream_bytes=len(body) - 1)
        assert broken is not None
        assert broken.status == 413
        assert tally["lines"] == tally["accepted"] < 3000


def test_errors_have_an_end() -> None:
    """Of more bad lines than are told all are counted, and the first are told, in order."""
    late = line_of(UNKNOWN, {"metric": "eval", "step": 1, "value": 1})
    lines = [late, *[b"oops"] * (5 * MOST_ERRORS), *numbered(RUNS[0], 1)]
    tally, _ = take(b"\n".join(lines))
    assert tally["error_count"] == 5 * MOST_ERRORS + 1
    assert [error["line"] for error in tally["errors"]] == list(range(1, MOST_ERRORS + 1))
    assert tally["accepted"] == 1


def test_runs_have_an_end() -> None:
    """A stream may name so many runs; lines of more are refused, and those of the others are not."""
    committer = FakeCommitter({UUID(int=number) for number in range(MOST_RUNS + 10)})
    lines = [numbered(UUID(int=number), 1)[0] for number in range(MOST_RUNS + 2)]
    tally, _ = take(b"\n".join([*lines, *numbered(UUID(int=7), 1, 1)]), committer=committer)
    assert tally["accepted"] == MOST_RUNS + 1
    assert [(error["line"], error["title"]) for error in tally["errors"]] == [
        (MOST_RUNS + 1, "Too many runs"),
        (MOST_RUNS + 2, "Too many runs"),
    ]


def test_time_has_an_end() -> None:
    """A stream that keeps the service busy for too long is broken off."""
    tally, broken = take(b"\n".join(numbered(RUNS[0], 10)), stream_seconds=-1.0)
    assert broken is not None
    assert broken.status == 408
    assert tally["lines"] == tally["accepted"]

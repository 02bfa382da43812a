"""Reading a stream of lines: results do not depend on cuts, reading waits for storage, and counts are exact."""

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
from evalstop_service.ingest import Message, Receipt
from evalstop_service.web.api.reading.decompression import create_decompressor
from evalstop_service.web.api.reading.json_lines import MOST_LINE_BYTES
from evalstop_service.web.api.reading.stream import MOST_RUNS, RUNS_AT_A_TIME, StreamIngestion, StreamLimits
from evalstop_service.web.api.reading.stream_result import MOST_ERRORS
from evalstop_service.web.problems import Problem
from hypothesis import given
from hypothesis import strategies as st

from tests.service.web.api.fake_committer import FakeCommitter
from tests.service.web.api.line_streams import COMPRESS

RUNS = [UUID(int=number) for number in range(1, 4)]
UNKNOWN = UUID(int=99)
DEADLINE_SECONDS = 60.0

observations_json = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["eval", "loss", "ü"]),
        "step": st.integers(0, 3),
        "value": st.sampled_from([0.5, 1, 2.0, "NaN", "Infinity"]),
    },
    optional={"stderr": st.just(0.1), "time": st.just("2026-01-01T00:00:00Z")},
)
batches = st.tuples(
    st.sampled_from([*RUNS, UNKNOWN]), st.lists(observations_json, min_size=1, max_size=3), st.booleans()
)
invalid_lines = st.sampled_from(
    [b"oops", b"{}", b"[]", b'"\xff"', b"[" * 2000, b"x" * (MOST_LINE_BYTES + 1), b'{"run_id": 1}', b"null", b"\x00"]
)
blank_lines = st.sampled_from([b"", b" ", b"\r"])


def encode_line(run_id: UUID, point: dict[str, Any]) -> bytes:
    return json.dumps({"run_id": str(run_id)} | point, separators=(",", ":"), ensure_ascii=False).encode()


def encode_batch(run_id: UUID, batch: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"run_id": str(run_id), "observations": batch}).encode()


async def iterate_parts(body: bytes, cut_offsets: Sequence[int]) -> AsyncIterator[bytes]:
    """The parts of a body that is cut at these offsets."""
    for begin, end in pairwise([0, *sorted(offset % (len(body) + 1) for offset in cut_offsets), len(body)]):
        yield body[begin:end]
        await asyncio.sleep(0)


async def read_stream(
    committer: FakeCommitter, body: AsyncIterator[bytes], encoding: str = "", **limits: Any
) -> tuple[dict[str, Any], Problem | None]:
    """The stream's result, and the problem that ended it early, if any."""
    unpack = create_decompressor(encoding)
    assert unpack is not None
    ingestion, problem = StreamIngestion(committer, UUID(int=1), StreamLimits(**limits)), None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await ingestion.ingest(body, unpack)
    except Problem as error:
        problem = error
    return msgspec.to_builtins(ingestion.totals.result(())), problem


def read_body(
    body: bytes,
    cut_offsets: Sequence[int] = (),
    encoding: str = "",
    committer: FakeCommitter | None = None,
    **limits: Any,
) -> tuple[dict[str, Any], Problem | None]:
    """The result of a stream that arrives in parts cut at these offsets."""
    committer = committer or FakeCommitter(set(RUNS))
    return asyncio.run(read_stream(committer, iterate_parts(body, cut_offsets), encoding, **limits))


@given(
    items=st.lists(batches | invalid_lines | blank_lines, max_size=12),
    cut_offsets=st.lists(st.integers(0, 10**7), max_size=8),
    encoding=st.sampled_from(sorted(COMPRESS)),
    max_pending=st.integers(1, 5),
    ends_with_newline=st.booleans(),
)
def test_results_do_not_depend_on_cuts_and_encoding(
    items: list[tuple[UUID, list[dict[str, Any]], bool] | bytes],
    cut_offsets: list[int],
    encoding: str,
    max_pending: int,
    ends_with_newline: bool,
) -> None:
    """However a stream is cut and compressed, the result is that of a dictionary filled line by line."""
    lines: list[bytes] = []
    values: dict[tuple[UUID, str, int], float] = {}
    errors: list[tuple[int, str]] = []
    runs: dict[str, int] = {}
    accepted = duplicates = 0
    for item in items:
        if isinstance(item, bytes):
            lines.append(item)
            if item.strip():
                errors.append((len(lines), "The line is"))
            continue
        run_id, batch, in_one_line = item
        for points in [batch] if in_one_line else [[point] for point in batch]:
            lines.append(encode_batch(run_id, points) if in_one_line else encode_line(run_id, points[0]))
            if run_id == UNKNOWN:
                errors.append((len(lines), "Not found"))
                continue
            runs.setdefault(str(run_id), 0)
            for point in points:
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
    body = b"\n".join(lines) + (b"\n" if ends_with_newline and lines else b"")
    committer = FakeCommitter(set(RUNS))
    result, problem = read_body(COMPRESS[encoding](body), cut_offsets, encoding, committer, max_pending=max_pending)
    assert problem is None
    assert repr(sorted(committer.values.items())) == repr(sorted(values.items()))
    assert result["accepted"] == accepted
    assert result["duplicates"] == duplicates
    assert result["conflict_count"] == sum(title == "Conflict" for _, title in errors)
    assert result["error_count"] == len(errors)
    actual_errors = [(error["line"], error["title"]) for error in result["errors"]]
    assert [line for line, _ in actual_errors] == [line for line, _ in errors]
    assert all(title.startswith(start) for (_, title), (_, start) in zip(actual_errors, errors, strict=True))
    assert [(run["run_id"], run["accepted"]) for run in result["runs"]] == list(runs.items())
    assert result["lines"] == (len(lines) if ends_with_newline or not lines or lines[-1] else len(lines) - 1)


def test_few_runs_are_posted_together() -> None:
    """To post those of 10,000 runs at once would stop the event loop for a second."""
    most_under_way = 0

    class CountingCommitter(FakeCommitter):
        async def submit(self, message: Message) -> Receipt:
            nonlocal most_under_way
            most_under_way = max(most_under_way, self.under_way + 1)
            return await super().submit(message)

    runs = [UUID(int=number) for number in range(1, 3001)]
    body = b"\n".join(encode_line(run, {"metric": "loss", "step": 1, "value": 0.5}) for run in runs)
    result, _ = read_body(body, committer=CountingCommitter(set(runs)))
    assert (result["accepted"], most_under_way) == (3000, RUNS_AT_A_TIME)


def encode_numbered_lines(run_id: UUID, count: int, start: int = 0) -> list[bytes]:
    return [encode_line(run_id, {"metric": "loss", "step": step, "value": 0.5}) for step in range(start, start + count)]


def test_reading_stops_at_the_limit_while_nothing_is_stored() -> None:
    """An endless sender is read up to the limit while storage is blocked, and further once there is room."""
    limit = 500
    lines_read = 0

    async def send_endlessly(stop: asyncio.Event) -> AsyncIterator[bytes]:
        nonlocal lines_read
        while not stop.is_set():
            lines_read += 10
            yield b"\n".join(encode_numbered_lines(RUNS[lines_read % 3], 10, lines_read)) + b"\n"

    async def read_and_store() -> None:
        committer = FakeCommitter(set(RUNS), open=asyncio.Event())
        assert committer.open is not None
        finished = asyncio.Event()
        reading = asyncio.create_task(read_stream(committer, send_endlessly(finished), max_pending=limit))
        previous = -1
        while lines_read > previous or committer.under_way == 0:  # until nothing more is read
            previous = lines_read
            for _ in range(1000):
                await asyncio.sleep(0)
        assert committer.under_way + limit <= lines_read < committer.under_way + limit + 20
        committer.open.set()
        while lines_read < 10_000:
            await asyncio.sleep(0)
        finished.set()
        result, problem = await reading
        assert problem is None
        assert result["accepted"] == len(committer.values) == lines_read
        assert max(size for _, size in committer.messages) < limit + 20

    asyncio.run(asyncio.wait_for(read_and_store(), DEADLINE_SECONDS))


def test_observations_of_a_run_are_stored_in_order() -> None:
    """A run has one batch at a time under way, so the first of two values for a step is stored."""
    lines = [encode_line(RUNS[0], {"metric": "eval", "step": 1, "value": value}) for value in range(50)]
    committer = FakeCommitter(set(RUNS))
    result, _ = read_body(b"\n".join(lines), range(0, 5000, 40), committer=committer, max_pending=3)
    assert committer.values == {(RUNS[0], "eval", 1): 0.0}
    assert len(committer.messages) > 5
    assert [error["line"] for error in result["errors"]] == list(range(2, 51))


def test_overload_delays_the_stream() -> None:
    """The stream continues after the committer was overloaded, and the sender sees no error."""
    committer = FakeCommitter(set(RUNS), failures=[Overloaded(), Overloaded(), Overloaded()])
    result, problem = read_body(b"\n".join(encode_numbered_lines(RUNS[0], 10)), committer=committer)
    assert problem is None
    assert result["accepted"] == 10


STORAGE_ERRORS: dict[str, Callable[[], Exception]] = {
    "overloaded for too long": Overloaded,
    "shutting down": Closed,
    "the database is unreachable": lambda: sa.exc.OperationalError("SELECT", {}, Exception("gone")),
}


@pytest.mark.parametrize("name", STORAGE_ERRORS)
def test_lasting_storage_errors_end_the_stream(name: str) -> None:
    """A stream ends with 503 when nothing can be stored any more, and states up to which line it was stored."""
    committer = FakeCommitter(set(RUNS))

    async def send_then_fail() -> AsyncIterator[bytes]:
        yield b"\n".join(encode_numbered_lines(RUNS[0], 10)) + b"\n"
        while len(committer.values) < 10:
            await asyncio.sleep(0)
        committer.failures = [STORAGE_ERRORS[name]() for _ in range(100)]
        for start in range(10, 10_000, 10):
            yield b"\n".join(encode_numbered_lines(RUNS[1], 10, start)) + b"\n"
            await asyncio.sleep(0)

    result, problem = asyncio.run(read_stream(committer, send_then_fail(), wait_seconds=0.0))
    assert problem is not None
    assert problem.status == 503
    assert "nothing was stored" not in problem.detail.lower()
    assert result["lines"] == result["accepted"] == 10
    assert result["error_count"] == 0


def test_internal_error_fails_only_its_own_lines() -> None:
    """Lines whose storing fails are reported as failed, and the other lines are stored."""
    committer = FakeCommitter(set(RUNS), failures=[RuntimeError("a fault")])
    body = b"\n".join(
        [
            *encode_numbered_lines(RUNS[0], 2),
            *encode_numbered_lines(RUNS[1], 2),
            b"",
            *encode_numbered_lines(RUNS[2], 2),
        ]
    )
    result, problem = read_body(body, committer=committer)
    assert problem is None
    assert result["accepted"] == 4
    assert [(error["line"], error["title"]) for error in result["errors"]] == [
        (1, "The service failed"),
        (2, "The service failed"),
    ]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(lost=st.integers(1, 10**6))
def test_truncated_stream_stores_its_complete_lines(encoding: str, lost: int) -> None:
    """The complete lines of a truncated stream are stored, and the whole stream can be sent again."""
    lines = encode_numbered_lines(RUNS[0], 20)
    compressed = COMPRESS[encoding](b"\n".join(lines))
    committer = FakeCommitter(set(RUNS))
    result, problem = read_body(compressed[: -(1 + lost % len(compressed))], encoding=encoding, committer=committer)
    assert problem is not None
    assert problem.status == 400
    stored = result["lines"]
    assert stored == result["accepted"] == len(committer.values) < 20
    second_result, problem = read_body(compressed, encoding=encoding, committer=committer)
    assert problem is None
    assert (second_result["duplicates"], second_result["accepted"]) == (stored, 20 - stored)


def test_listed_errors_are_limited_but_all_are_counted() -> None:
    """Only the first errors are listed, in order of lines, but all are counted."""
    unknown_run = encode_line(UNKNOWN, {"metric": "eval", "step": 1, "value": 1})
    lines = [unknown_run, *[b"oops"] * (5 * MOST_ERRORS), *encode_numbered_lines(RUNS[0], 1)]
    result, _ = read_body(b"\n".join(lines))
    assert result["error_count"] == 5 * MOST_ERRORS + 1
    assert [error["line"] for error in result["errors"]] == list(range(1, MOST_ERRORS + 1))
    assert result["accepted"] == 1


def test_runs_per_stream_are_limited() -> None:
    """Lines of more runs than a stream may name are refused, and those of the others are stored."""
    committer = FakeCommitter({UUID(int=number) for number in range(MOST_RUNS + 10)})
    lines = [encode_numbered_lines(UUID(int=number), 1)[0] for number in range(MOST_RUNS + 2)]
    result, _ = read_body(b"\n".join([*lines, *encode_numbered_lines(UUID(int=7), 1, 1)]), committer=committer)
    assert result["accepted"] == MOST_RUNS + 1
    assert [(error["line"], error["title"]) for error in result["errors"]] == [
        (MOST_RUNS + 1, "Too many runs"),
        (MOST_RUNS + 2, "Too many runs"),
    ]


def test_stream_over_the_time_limit_is_ended() -> None:
    """A stream that lasts too long ends with 408."""
    result, problem = read_body(b"\n".join(encode_numbered_lines(RUNS[0], 10)), stream_seconds=-1.0)
    assert problem is not None
    assert problem.status == 408
    assert result["lines"] == result["accepted"]

"""The limit of PostgreSQL: COPY by bare asyncpg, each batch a transaction, into a table keyed like observations."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg  # type: ignore[import-untyped]
import msgspec
import uvloop

from evalstop_lab.benchmarks import dialects
from evalstop_lab.benchmarks.generator import Load, percentile

COLUMNS = ("run_id", "metric", "step", "superseded_by", "value", "stderr", "attempt", "observed_at", "received_at")

VALUES = tuple(dialects.value("proxy", number) for number in range(1000))


class CopyJob(msgspec.Struct, frozen=True, kw_only=True):
    """One load: connection number i copies batches of each of the runs i, i + clients, ... in turn."""

    table: str
    runs: tuple[UUID, ...]
    clients: int
    batch: int
    seconds: float


async def bring(url: str, pool: list[Any], job: CopyJob) -> Load:
    """Copy for so many seconds; all that is counted is committed."""
    while len(pool) < job.clients:
        pool.append(await asyncpg.connect(url))
    latencies: list[float] = []
    begun, cpu = time.perf_counter(), time.process_time()

    async def copies(number: int) -> None:
        turns = itertools.cycle([_rows(run) for run in job.runs[number :: job.clients]])
        while (at := time.perf_counter()) < begun + job.seconds:
            rows = list(itertools.islice(next(turns), job.batch))
            await pool[number].copy_records_to_table(job.table, records=rows, columns=COLUMNS)
            latencies.append(time.perf_counter() - at)

    await asyncio.gather(*map(copies, range(job.clients)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    latencies.sort()
    return Load(
        observations=len(latencies) * job.batch,
        requests=len(latencies),
        refused=0,
        seconds=seconds,
        p50_ms=percentile(latencies, 0.5) * 1000,
        p99_ms=percentile(latencies, 0.99) * 1000,
        generator_cpu=cpu / seconds,
    )


def _rows(run: UUID) -> Any:
    values = itertools.cycle(VALUES)
    return zip(
        itertools.repeat(run),
        itertools.cycle(dialects.MIX),
        itertools.count(),
        itertools.repeat(0),
        values,
        itertools.repeat(None),
        itertools.repeat(1),
        itertools.repeat(None),
        itertools.repeat(datetime.now(UTC)),
        strict=False,
    )


def main() -> int:
    """Bring one load after another until standard input ends; the argument is the database."""
    loop = uvloop.new_event_loop()
    pool: list[Any] = []
    for line in sys.stdin:
        try:
            load = loop.run_until_complete(bring(sys.argv[1], pool, msgspec.json.decode(line, type=CopyJob)))
            answer = msgspec.json.encode(load)
        except (asyncpg.PostgresError, OSError) as error:
            answer = msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

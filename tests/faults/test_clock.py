"""The clock stepping back an hour, or standing still: what came last is told by counting, never by the time.

The clock of a real process is put back by a library of a few lines that is loaded before all others.
"""

from __future__ import annotations

import itertools
import shutil
import struct
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer, Content, Message, Observations, Resumed, RunCache, running_in_thread
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import tables, verdicts
from evalstop_service.store.database import Database

from tests.faults.retrying_clients import Caller, batch, told
from tests.faults.run_records import assert_nothing_lost, history, installed, run_of, stands, undisturbed, values
from tests.faults.servers import serving
from tests.service.project_fixture import NOW, set_up_project

pytestmark = pytest.mark.real

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
static volatile long *behind_seconds;
__attribute__((constructor)) static void find(void) {
    int file = open(CLOCK, O_RDONLY);
    behind_seconds = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t which, struct timespec *shown) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, shown);
    if (which == CLOCK_REALTIME) shown->tv_sec -= *behind_seconds;
    return result;
}
"""
STEPS = 120
HOUR = timedelta(hours=1)


def stepping_back() -> Clock:
    """A clock that goes back an hour at every third look, and stands still between."""
    looks = itertools.count()
    return lambda: NOW - HOUR * (next(looks) // 3)


def test_back_by_an_hour(database: Database, embedded_database: Database) -> None:
    """Two processes whose clock steps back again and again, and shows each moment thrice, store and judge what one with
    a good clock does; every change of the run is told from every other.
    """
    project, clock = set_up_project(database), stepping_back()
    run = project.open_run(policy="paper", mode="enforce")
    processes = [Committer(database, RunCache(), clock, ServiceMetrics()) for _ in range(2)]
    middle, steps = STEPS // 2, [Observations(tuple(told(step))) for step in range(STEPS)]
    news: list[Content] = [*steps[:middle], Resumed(middle - 10), *steps[middle - 9 :]]
    stamps = []
    with running_in_thread(processes[0]), running_in_thread(processes[1]):
        for step, item in enumerate(news):
            receipt = processes[step % 2].submit_and_wait(Message(project.id, run.id, item))
            stamps.append((receipt.run.version, receipt.run.updated_at))
    other, expected = undisturbed(embedded_database, news)
    assert len({version for version, _ in stamps}) == len(stamps)
    assert stamps == sorted(stamps, key=lambda stamp: stamp[0])
    assert stands(project.load_run(run)) == stands(expected)
    assert values(project, run) == values(other, expected)
    assert history(project, run) == history(other, expected)
    with database.reading() as tx:
        told_last = [change.verdict for change in verdicts.list_verdicts(tx, run.id)]
        times = list(tx.execute(sa.select(tables.verdicts.c.at).order_by(tables.verdicts.c.sequence)).scalars())
    assert times == sorted(times, reverse=True)
    assert told_last == [verdict for _, verdict in history(other, expected)["verdicts"]][::-1]


def a_clock(folder: Path) -> tuple[Path, Path]:
    """The library, and the file that holds by how many seconds its clock is behind; skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library, file = folder / "clock.c", folder / "clock.so", folder / "clock"
    source.write_text(SOURCE)
    file.write_bytes(struct.pack("l", 0))
    options = ["-O1", "-shared", "-fPIC", f'-DCLOCK="{file}"', "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return library, file


def test_a_process_steps_back(tmp_path: Path, migrated_file: Path, embedded_database: Database) -> None:
    """A service whose clock steps back an hour amid posts goes on as if nothing had happened."""
    library, file = a_clock(tmp_path)
    shutil.copyfile(migrated_file, tmp_path / "evalstop.db")
    database = Database(f"sqlite:///{tmp_path / 'evalstop.db'}")
    project, key = installed(database)
    with (
        serving(tmp_path, f"sqlite:///{tmp_path / 'evalstop.db'}", LD_PRELOAD=str(library)) as service,
        Caller(key, lambda: service.url) as caller,
    ):
        run_id = caller.post("/runs", {"name": "back", "policy": "paper", "mode": "enforce"})["id"]
        for step in range(STEPS):
            if step in (33, 60):  # right before the verdict turns, and long after
                with file.open("r+b") as behind:
                    behind.write(struct.pack("l", int(HOUR.total_seconds()) * (1 + step // 60)))
            assert caller.post(f"/runs/{run_id}/observations", batch(told(step)))["accepted"] == 3
        told_last = [change["verdict"]["verdict"] for change in caller.get(f"/runs/{run_id}/verdicts")["items"]]
        assert (caller.refusals, caller.cut) == ([], 0)
    run = run_of(project, run_id)
    assert run.updated_at < run.created_at - HOUR
    assert told_last == ["stop", "suspect"]
    assert_nothing_lost(project, run_id, [told(step) for step in range(STEPS)], embedded_database)
    database.close()

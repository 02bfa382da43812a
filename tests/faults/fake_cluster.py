"""A fake cluster of up to 1,000 jobs: a folder per job, a shell script as scheduler, trainers that save on request.

A job's files, whose modification times are when it happened: `running` (exists while the job holds its GPU),
`asked` (to save a checkpoint), `saved`, `cancelled`, and `ends` (one line for each time that the job ended).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.2
"""Time between two scans of the jobs' folders, which take a while with 1,000 jobs."""

IGNORE_SHARE, COMPLETE_SHARE = 0.05, 0.1
"""Shares of the trainers that ignore a request to save, and that end after saving."""

SCRIPT = """
cd {folder}/$2 || exit 1
case $1 in
save) [ -e asked ] || : > asked;;
cancel) [ -e cancelled ] || : > cancelled; mv running ended 2> /dev/null && echo cancelled >> ends;;
check) [ -e running ] || exit 3;;
esac
exit 0
"""


@dataclass(frozen=True)
class FakeJob:
    """A job of the cluster; its state is in the files of its folder."""

    folder: Path

    @property
    def is_running(self) -> bool:
        return (self.folder / "running").exists()

    @property
    def end_count(self) -> int:
        """How often the job ended; must never exceed 1."""
        file = self.folder / "ends"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def time_of(self, name: str) -> float | None:
        """When this file of the job was written; None if it does not exist."""
        file = self.folder / name
        return file.stat().st_mtime if file.exists() else None

    def complete(self) -> None:
        """End the job by itself, unless it was cancelled."""
        try:
            (self.folder / "running").rename(self.folder / "ended")
        except FileNotFoundError:
            return
        with (self.folder / "ends").open("a") as ends:
            ends.write("completed\n")


class FakeCluster:
    """Jobs, the scheduler's script and the jobs' trainers, which call `report_checkpoint` when they have saved."""

    def __init__(self, folder: Path, rng: random.Random, report_checkpoint: Callable[[str], None]) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.script = folder / "scheduler.sh"
        self._folder = folder / "jobs"
        self._folder.mkdir()
        self.script.write_text(SCRIPT.format(folder=self._folder))
        self._rng, self._report_checkpoint = rng, report_checkpoint
        self._asked: set[str] = set()
        self._end = threading.Event()
        self._scanner = ThreadPoolExecutor(1)
        self._scan: Future[None] | None = None

    def submit_job(self, name: str) -> FakeJob:
        """Start a job with this name."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "running").touch()
        self.jobs[name] = FakeJob(folder)
        return self.jobs[name]

    def has_asked_jobs(self, count: int) -> bool:
        """Whether `count` trainers have seen the request to save; raises what made them fail."""
        if self._scan is not None and self._scan.done():
            self._scan.result()
        return len(self._asked) >= count

    def __enter__(self) -> FakeCluster:
        self._scan = self._scanner.submit(self._run_trainers)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._scanner.shutdown()
        if self._scan is not None:
            self._scan.result()

    def _run_trainers(self) -> None:
        """Save a checkpoint for each job that was asked; a few ignore it, and a few end after saving."""
        saves: list[Future[None]] = []
        with ThreadPoolExecutor(8) as trainers:
            while not self._end.wait(POLL_SECONDS):
                for save in [save for save in saves if save.done()]:
                    saves.remove(save)
                    save.result()
                for name in [name for name in self.jobs if name not in self._asked]:
                    if self.jobs[name].time_of("asked") is not None:
                        self._asked.add(name)
                        if self._rng.random() > IGNORE_SHARE:
                            completes = self._rng.random() < COMPLETE_SHARE
                            saves.append(trainers.submit(self._save, name, completes))
        for save in saves:
            save.result()

    def _save(self, name: str, completes: bool) -> None:
        self._report_checkpoint(name)
        job = self.jobs[name]
        (job.folder / "saved").touch()
        if completes:
            job.complete()

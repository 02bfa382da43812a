"""A fake cluster of a thousand jobs: a folder a job, a shell script for a scheduler, and trainers that save when asked.

The files of a job, each written once, at the time that matters: `running` (there while it holds its GPU), `asked`,
`saved`, `cancelled`; and `ends`, a line for each time that it ended.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
cd {folder}/$2 || exit 1
case $1 in
save) [ -e asked ] || : > asked;;
cancel) [ -e cancelled ] || : > cancelled; mv running ended 2> /dev/null && echo ended >> ends;;
check) [ -e running ] || exit 3;;
esac
exit 0
"""


@dataclass(frozen=True)
class FakeJob:
    """A job of the cluster, as its folder tells."""

    folder: Path

    @property
    def runs(self) -> bool:
        return (self.folder / "running").exists()

    @property
    def ends(self) -> int:
        """How often it ended."""
        file = self.folder / "ends"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def at(self, name: str) -> float | None:
        """When something happened to it."""
        file = self.folder / name
        return file.stat().st_mtime if file.exists() else None

    def quit(self) -> None:
        """End by itself, unless it was ended."""
        try:
            (self.folder / "running").rename(self.folder / "ended")
        except FileNotFoundError:
            return
        with (self.folder / "ends").open("a") as ends:
            ends.write("quit\n")


class FakeCluster:
    """Jobs, their scheduler's script, and their trainers; `saved` tells the service of a checkpoint."""

    def __init__(self, folder: Path, chance: random.Random, saved: Callable[[str], None]) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.script = folder / "scheduler.sh"
        self._folder = folder / "jobs"
        self._folder.mkdir()
        self.script.write_text(SCRIPT.format(folder=self._folder))
        self._chance, self._saved = chance, saved
        self._asked: set[str] = set()
        self._end = threading.Event()
        self._watch = threading.Thread(target=self._train, name="trainers")

    def submit(self, name: str) -> FakeJob:
        """Start a job."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "running").touch()
        self.jobs[name] = FakeJob(folder)
        return self.jobs[name]

    def has_asked(self, count: int) -> bool:
        """Whether the trainers of so many jobs have seen that they are to save."""
        return len(self._asked) >= count

    def __enter__(self) -> FakeCluster:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watch.join()

    def _train(self) -> None:
        """Have each job that was asked save, but for a few that are deaf; a few of the others end after that."""
        with ThreadPoolExecutor(8) as trainers:
            while not self._end.wait(LISTEN_SECONDS):
                for name in [name for name in self.jobs if name not in self._asked]:
                    if self.jobs[name].at("asked") is not None:
                        self._asked.add(name)
                        if self._chance.random() > DEAF:
                            trainers.submit(self._save, name, self._chance.random() < QUITTING)

    def _save(self, name: str, quits: bool) -> None:
        self._saved(name)
        job = self.jobs[name]
        (job.folder / "saved").touch()
        if quits:
            job.quit()


LISTEN_SECONDS = 0.2
"""Between two looks of the trainers at who was asked: with a thousand of them each look takes its time."""

DEAF, QUITTING = 0.05, 0.1
"""Shares of the trainers that do not save when they are asked, and that end when they have saved."""

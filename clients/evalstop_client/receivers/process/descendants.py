"""Finds the living processes of a job: its group, and descendants in other groups.

A launcher may put its workers into separate sessions (torchrun does), where a signal to the job's group does not reach
them. The caller becomes the subreaper (Linux), so that orphans stay its descendants.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evalstop_client.receivers.stop.processes import set_process_attribute

PR_SET_CHILD_SUBREAPER = 36
DEAD_STATES = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    group: int
    state: str
    started: str = ""  # in clock ticks since the machine's start; "" from `ps`


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose parent dies; False if that is not possible."""
    return set_process_attribute(PR_SET_CHILD_SUBREAPER, 1)


def find_living_processes(group: int, ancestor: int) -> list[Process]:
    """The living processes of `group` and the living descendants of `ancestor`."""
    table = list(list_processes())
    family = {ancestor}
    while born := {process.pid for process in table if process.parent in family} - family:
        family |= born
    return [
        process
        for process in table
        if process.pid != os.getpid()
        and process.state[:1] not in DEAD_STATES
        and (process.group == group or process.pid in family)
    ]


def find_family(processes: list[Process], pid: int, started: str) -> list[Process]:
    """Those of these processes that are the one with this id and start time, or its descendants."""
    family = {process.pid for process in processes if (process.pid, process.started) == (pid, started)}
    while born := {process.pid for process in processes if process.parent in family} - family:
        family |= born
    return [process for process in processes if process.pid in family]


def list_processes() -> Iterator[Process]:
    """All processes, from /proc, or from `ps` where there is no /proc."""
    return _from_proc() if Path("/proc/self/stat").exists() else list_processes_by_ps()


def list_processes_by_ps() -> Iterator[Process]:
    """All processes but the `ps` that lists them."""
    command = ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # a constant
    for line in listing.communicate()[0].splitlines():
        pid, parent, group, state = line.split()[:4]
        if int(pid) != listing.pid:
            yield Process(int(pid), int(parent), int(group), state)


def reap_orphans(child: int) -> None:
    """Reap adopted processes that have exited; `child` is left to its own waiter."""
    for process in list_processes():
        if process.parent == os.getpid() and process.pid != child and process.state[:1] in DEAD_STATES:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _from_proc() -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # "pid (command) state ppid pgrp ...": the command may hold spaces and parentheses itself
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield Process(int(folder.name), int(fields[1]), int(fields[2]), fields[0], fields[19])

"""Disks: how long one takes to make a write durable, and one that takes longer than it does.

The slower disk is a library of a few lines that is loaded into PostgreSQL before all others and waits after each fsync.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static int late(const char *name, int file) {
    int (*real)(int) = (int (*)(int)) dlsym(RTLD_NEXT, name);
    struct timespec pause = {0, DELAY_MS * 1000000L};
    int result = real(file);
    nanosleep(&pause, 0);
    return result;
}
int fsync(int file) { return late("fsync", file); }
int fdatasync(int file) { return late("fdatasync", file); }
"""


def compiled(folder: Path, delay_ms: int) -> Path | None:
    """The library; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "slow_disk.c", folder / "slow_disk.so"
    source.write_text(SOURCE)
    options = ["-O1", "-shared", "-fPIC", f"-DDELAY_MS={delay_ms}", "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    for place in (folder, library):
        place.chmod(0o755)  # whoever runs PostgreSQL has to read it
    return library


def sync_ms(folder: Path, times: int = 200) -> float:
    """Milliseconds until a block of 8 kB appended to a file in the folder is durable, the median of some times."""
    path = folder / "sync-probe"
    taken = []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(b"x" * 8192)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - begun)
    path.unlink()
    return statistics.median(taken) * 1000

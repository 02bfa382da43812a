"""What a program stands on, made to fail: a small disk that a test fills, and a clock that is set back."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

DISK = "4m"


def build_small_disk_command(folder: Path) -> list[str]:
    """The command prefix that mounts a small disk on `folder` for a program; skips without the right to mount."""
    script = f'mount -t tmpfs -o size={DISK} tmpfs "$0" && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        command = [*unshare, "sh", "-c", script, str(folder)]
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("mounting a small disk is not permitted")


def fill_disk(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue


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


def build_clock_library(folder: Path) -> tuple[Path, Path]:
    """Compile the library; returns it and the file with the seconds to subtract. Skips without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library, file = folder / "clock.c", folder / "clock.so", folder / "clock"
    source.write_text(SOURCE)
    file.write_bytes(struct.pack("l", 0))
    options = ["-O1", "-shared", "-fPIC", f'-DCLOCK="{file}"', "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return library, file

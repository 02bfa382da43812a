"""A disk of a few megabytes for a program, which a test fills."""

from __future__ import annotations

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

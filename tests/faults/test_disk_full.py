"""The disk under the embedded database is full: refused with the reason, and taken again once there is room."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.acceptance.programs import Program
from tests.faults.retrying_clients import Caller, batch, helpful, told

pytestmark = pytest.mark.real

DISK = "4m"


def on_a_small_disk(folder: Path) -> list[str]:
    """The words under which a program finds a disk of its own in `folder`; skips where that is not allowed."""
    script = f'mount -t tmpfs -o size={DISK} tmpfs "$0" && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        words = [*unshare, "sh", "-c", script, str(folder)]
        try:
            if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
                return words
        except FileNotFoundError:
            break
    pytest.skip("this system lets nobody mount a small disk")


def test_full(tmp_path: Path) -> None:
    """With no room left, posts and new runs are refused and told why; nothing acknowledged is lost, and with room again
    the same is taken, without anybody's help.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    program = Program(
        tmp_path / "log",
        *("up", "--json", "--port", "0", "--data-folder", str(folder)),
        under=on_a_small_disk(folder),
    )
    try:
        started = program.start_server()
        with Caller(started["key"], lambda: str(started["url"])) as caller:
            run_id = caller.post("/runs", {"name": "full", "policy": "paper"})["id"]
            step = 0
            for step in range(5):
                caller.post(f"/runs/{run_id}/observations", batch(told(step)))
            filler = Path(f"/proc/{program.pid}/root{folder}/filler")
            fill(filler)
            step = 5
            while (response := caller.try_once(f"/runs/{run_id}/observations", batch(told(step)))).status_code == 200:
                step += 1
            assert "disk" in helpful(response)["detail"]
            for _ in range(3):
                again = helpful(caller.try_once(f"/runs/{run_id}/observations", batch(told(step))))
                assert "is full" in again["detail"]
            assert "is full" in helpful(caller.try_once("/runs", {"name": "another"}))["detail"]
            assert stored(caller, run_id) == step
            filler.unlink()
            assert caller.post(f"/runs/{run_id}/observations", batch(told(step)))["accepted"] == 3
            caller.post("/runs", {"name": "another"})
            assert stored(caller, run_id) == step + 1
    finally:
        program.kill()


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue


def stored(caller: Caller, run_id: str) -> int:
    """How many evals the run has."""
    document = caller.get(f"/runs/{run_id}/observations", metric="eval", limit="10000")
    return len(document["items"])

"""What must survive: the service killed and started again, the trainer killed, both real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clients.fake_service import KEY
from tests.clients.programs import running_fake_service, running_script, wait_until

pytestmark = pytest.mark.real

TRAINER = """
import os, sys, time
from evalstop_client import Run

first, last, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with Run(name="a run", metrics={"gold": {"role": "eval"}}, resume="allow" if first else None) as run:
    if first:
        run.resume(step=first)
    for step in range(first, last):
        run.log({"gold": step / 8, "kl": float(step)}, step=step)
        if step % 10 == 0:
            run.checkpoint(f"file:///ckpt/{step}", step=step)
        print(step, flush=True)
        time.sleep(pause)
    if last == 10_000:
        time.sleep(3600)
print("dropped", run.dropped, flush=True)
"""


def start_trainer(url: str, first: int, last: int, pause: float) -> Any:
    script = f"import sys; sys.argv[1:] = ['{first}', '{last}', '{pause}']\n" + TRAINER
    return running_script(script, EVALSTOP_URL=url, EVALSTOP_KEY=KEY)


def said(child: subprocess.Popen[str], line: str) -> None:
    """Read what the trainer prints until it says `line`."""
    assert child.stdout is not None
    for spoken in child.stdout:
        if spoken.strip() == line:
            return
    raise AssertionError(f"the trainer never said {line}")


def accepted(record: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the service has acknowledged, in its order, over all its lives."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return [(line["path"].rpartition("/")[2], line["body"]) for line in lines]


def kinds_and_steps(record: Path) -> list[tuple[str, int]]:
    """Each observation of gold and each checkpoint and resume with its step, repeats left out, in order."""
    flat: list[tuple[str, int]] = []
    for what, body in accepted(record):
        if what == "observations":
            flat += [("gold", point["step"]) for point in body["observations"] if point["metric"] == "gold"]
        elif what in ("checkpoints", "resume"):
            flat.append((what, body["step"]))
    return list(dict.fromkeys(flat))


def gold_steps(posts: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The steps of all observations of gold in `posts`, repeats included."""
    points = [point for what, body in posts if what == "observations" for point in body["observations"]]
    return [point["step"] for point in points if point["metric"] == "gold"]


def expected(first: int, last: int) -> list[tuple[str, int]]:
    """What `TRAINER` makes of its arguments."""
    made: list[tuple[str, int]] = [("resume", first)] if first else []
    for step in range(first, last):
        made += [("gold", step)] + ([("checkpoints", step)] if step % 10 == 0 else [])
    return made


def test_service_killed_and_started_again_loses_nothing(tmp_path: Path) -> None:
    """While the service is away, twice, the trainer runs on; afterwards all has arrived, in order."""
    record = tmp_path / "record"
    with contextlib.ExitStack() as programs:
        service, port = programs.enter_context(running_fake_service(record))
        child = programs.enter_context(start_trainer(f"http://127.0.0.1:{port}", 0, 300, 0.01))
        for stop_at, start_at in ((60, 120), (180, 220)):
            said(child, str(stop_at))
            service.send_signal(signal.SIGKILL)
            service.wait()
            said(child, str(start_at))
            service, _ = programs.enter_context(running_fake_service(record, port))
        said(child, "dropped 0")
        assert child.wait(30) == 0
    assert kinds_and_steps(record) == expected(0, 300)
    assert accepted(record)[-1] == ("finish", {"status": "completed"})


def test_killed_trainer_is_reported_by_its_successor(tmp_path: Path) -> None:
    """What a trainer logged before kill -9, with the service away, is sent first by the next run of its name."""
    record, spool = tmp_path / "record", tmp_path / "spool"
    with running_fake_service(record) as (service, port):
        url = f"http://127.0.0.1:{port}"
        with start_trainer(url, 0, 10_000, 0.005) as first:
            said(first, "50")
            wait_until(lambda: len(kinds_and_steps(record)) > 10)
            service.send_signal(signal.SIGKILL)
            service.wait()
            said(first, "150")
            wait_until(lambda: b'"step":150' in b"".join(path.read_bytes() for path in spool.glob("*/*.jsonl")))
            first.send_signal(signal.SIGKILL)
            first.wait()
        (segment,) = spool.glob("*/*.jsonl")
        with segment.open("ab") as file:
            file.write(b'{"to":"observations","body":{"observations":[{"metric":"go')  # torn in the middle of a write
    with running_fake_service(record, port), start_trainer(url, 100, 160, 0.0) as second:
        said(second, "dropped 0")
        assert second.wait(30) == 0
    arrived = kinds_and_steps(record)
    assert arrived[: len(expected(0, 151))] == expected(0, 151)
    assert arrived.index(("resume", 100)) >= len(expected(0, 151))
    posts = accepted(record)
    resumed = max(index for index, (what, _) in enumerate(posts) if what == "resume")
    assert gold_steps(posts[resumed:]) == list(range(100, 160))
    assert posts[-1] == ("finish", {"status": "completed"})
    assert not list(spool.glob("*/*.jsonl"))


def test_trainer_without_a_service_ends_by_itself_and_leaves_its_data(tmp_path: Path) -> None:
    """Against a port where nobody listens training runs to its end, exits 0 in bounded time, and all is on disk."""
    script = TRAINER.replace("Run(", "Run(flush_seconds=0.5, ")
    script = "import sys; sys.argv[1:] = ['0', '40', '0']\n" + script
    with running_script(script, EVALSTOP_URL="http://127.0.0.1:1", EVALSTOP_KEY=KEY) as child:
        said(child, "dropped 0")
        assert child.wait(30) == 0
    (segment,) = (tmp_path / "spool").glob("*/*.jsonl")
    lines = [json.loads(line) for line in segment.read_text().splitlines()]
    assert [line["to"] for line in lines].count("observations") == 40
    assert (lines[0]["to"], lines[-1]["to"]) == ("open", "finish")


def test_trainer_that_forgets_to_finish_is_flushed_at_exit(tmp_path: Path) -> None:
    """Without the `with` block nothing is lost at a normal exit, and nobody claims that the run has ended."""
    record = tmp_path / "record"
    script = "from evalstop_client import Run\nRun(name='a run').log({'gold': 1.0}, step=1)"
    with running_fake_service(record) as (_, port):
        with running_script(script, EVALSTOP_URL=f"http://127.0.0.1:{port}", EVALSTOP_KEY=KEY) as child:
            assert child.wait(30) == 0
        assert [what for what, _ in accepted(record)] == ["runs", "observations"]


def test_logging_never_waits_for_a_service_that_hangs(tmp_path: Path) -> None:
    """A service that accepts connections and says nothing slows no call down."""
    script = """
import socket, sys, time
from evalstop_client import Run
silent = socket.create_server(("127.0.0.1", 0))
with Run(url=f"http://127.0.0.1:{silent.getsockname()[1]}", name="a run", flush_seconds=0) as run:
    began = time.monotonic()
    for step in range(5_000):
        run.log({"gold": 1.0}, step=step)
    print("shorter than a timeout" if time.monotonic() - began < 9 else "waited", flush=True)
"""
    began = time.monotonic()
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert output.stdout.strip() == "shorter than a timeout"
    assert time.monotonic() - began < 60

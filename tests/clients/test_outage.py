"""Crashes of service and trainer, both as real processes: nothing is lost."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evalstop_client import Limits, Run
from evalstop_service.clock import utc_now
from evalstop_service.store import keys
from evalstop_service.store.database import Database

from tests.clients.fake_service import KEY
from tests.clients.programs import running_fake_service, running_script, wait_until
from tests.clients.real_service import Project, make_project
from tests.clients.runs import list_messages
from tests.fixtures.projects import create_named_key

pytestmark = pytest.mark.real

TRAINER = """
import os, sys, time
from evalstop_client import Run

first, last, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with Run(name="a run", metrics={"score": {"role": "eval"}}, resume="allow" if first else None) as run:
    if first:
        run.resume(step=first)
    for step in range(first, last):
        run.log({"score": step / 8, "kl": float(step)}, step=step)
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


def read_until(child: subprocess.Popen[str], line: str) -> None:
    """Read what the trainer prints up to this line."""
    assert child.stdout is not None
    for printed in child.stdout:
        if printed.strip() == line:
            return
    raise AssertionError(f"the trainer did not print {line}")


def load_posts(record: Path) -> list[tuple[str, dict[str, Any]]]:
    """The accepted posts over all restarts of the service, as (last part of the path, body)."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return [(line["path"].rpartition("/")[2], line["body"]) for line in lines]


def list_steps(record: Path) -> list[tuple[str, int]]:
    """The steps of score, checkpoints and resumes in order, without repeats."""
    steps: list[tuple[str, int]] = []
    for kind, body in load_posts(record):
        if kind == "observations":
            steps += [("score", point["step"]) for point in body["observations"] if point["metric"] == "score"]
        elif kind in ("checkpoints", "resume"):
            steps.append((kind, body["step"]))
    return list(dict.fromkeys(steps))


def list_score_steps(posts: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The steps of score in `posts`, repeats included."""
    points = [point for kind, body in posts if kind == "observations" for point in body["observations"]]
    return [point["step"] for point in points if point["metric"] == "score"]


def list_expected_steps(first: int, last: int) -> list[tuple[str, int]]:
    """What `TRAINER` posts for these arguments."""
    steps: list[tuple[str, int]] = [("resume", first)] if first else []
    for step in range(first, last):
        steps += [("score", step)] + ([("checkpoints", step)] if step % 10 == 0 else [])
    return steps


def test_restarted_service_receives_everything_in_order(tmp_path: Path) -> None:
    """The trainer continues through two outages, and afterwards everything has arrived in order."""
    record = tmp_path / "record"
    with contextlib.ExitStack() as programs:
        service, port = programs.enter_context(running_fake_service(record))
        child = programs.enter_context(start_trainer(f"http://127.0.0.1:{port}", 0, 300, 0.01))
        for stop_at, start_at in ((60, 120), (180, 220)):
            read_until(child, str(stop_at))
            service.send_signal(signal.SIGKILL)
            service.wait()
            read_until(child, str(start_at))
            service, _ = programs.enter_context(running_fake_service(record, port))
        read_until(child, "dropped 0")
        assert child.wait(60) == 0
    assert list_steps(record) == list_expected_steps(0, 300)
    assert load_posts(record)[-1] == ("finish", {"status": "completed"})


def test_restarted_trainer_sends_the_killed_ones_spool(tmp_path: Path) -> None:
    """What a killed trainer had spooled is sent first by the next run of its name, but not a torn line."""
    record, spool = tmp_path / "record", tmp_path / "spool"
    with running_fake_service(record) as (service, port):
        url = f"http://127.0.0.1:{port}"
        with start_trainer(url, 0, 10_000, 0.005) as first:
            read_until(first, "50")
            wait_until(lambda: len(list_steps(record)) > 10)
            service.send_signal(signal.SIGKILL)
            service.wait()
            read_until(first, "150")
            wait_until(lambda: b'"step":150' in b"".join(path.read_bytes() for path in spool.glob("*/*.jsonl")))
            first.send_signal(signal.SIGKILL)
            first.wait()
        (segment,) = spool.glob("*/*.jsonl")
        with segment.open("ab") as file:
            file.write(b'{"to":"observations","body":{"observations":[{"metric":"sc')  # torn in the middle of a write
    with running_fake_service(record, port), start_trainer(url, 100, 160, 0.0) as second:
        read_until(second, "dropped 0")
        assert second.wait(60) == 0
    arrived = list_steps(record)
    assert arrived[: len(list_expected_steps(0, 151))] == list_expected_steps(0, 151)
    assert arrived.index(("resume", 100)) >= len(list_expected_steps(0, 151))
    posts = load_posts(record)
    resumed = max(index for index, (kind, _) in enumerate(posts) if kind == "resume")
    assert list_score_steps(posts[resumed:]) == list(range(100, 160))
    assert posts[-1] == ("finish", {"status": "completed"})
    assert not list(spool.glob("*/*.jsonl"))


@pytest.mark.nightly
def test_unfinished_run_is_flushed_at_exit(tmp_path: Path) -> None:
    """A run without a `with` block is flushed at exit, and is not finished."""
    record = tmp_path / "record"
    script = "from evalstop_client import Run\nRun(name='a run').log({'score': 1.0}, step=1)"
    with running_fake_service(record) as (_, port):
        with running_script(script, EVALSTOP_URL=f"http://127.0.0.1:{port}", EVALSTOP_KEY=KEY) as child:
            assert child.wait(60) == 0
        assert [kind for kind, _ in load_posts(record)] == ["runs", "observations"]


@pytest.mark.nightly
def test_no_call_waits_for_a_hanging_service() -> None:
    """No call, nor the end of the process, waits for a service that accepts a connection and is silent."""
    script = """
import socket
from evalstop_client import Limits, Run
silent = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{silent.getsockname()[1]}"
with Run(url=url, name="a run", limits=Limits(flush_seconds=0, timeout_seconds=86_400)) as run:
    connection, _ = silent.accept()
    for step in range(5_000):
        run.log({"score": 1.0}, step=step)
        assert not run.should_stop
    run.checkpoint("/ckpt/4999", step=4_999)
print("dropped", run.dropped, flush=True)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.strip() == "dropped 0"


def create_revoked_key(project: Project) -> str:
    """A key of the project that the service refuses, so that a run spools what it logs."""
    key, secret = create_named_key(project.database, project.name, "revoked", ("ingest",), utc_now())
    assert key.project_id is not None
    with project.database.transaction() as tx:
        assert keys.revoke_key(tx, key.project_id, key.id, utc_now()) is not None
    return secret


def log_run(project: Project, key: str, value: float) -> None:
    """Log one eval in a run of one name."""
    with Run("a run", url=project.url, key=key, limits=Limits(flush_seconds=60)) as run:
        run.log({"eval": value}, step=0)


def list_evals(project: Project) -> list[float]:
    """The evals of all runs of the project, oldest run first."""
    runs = sorted(project.api.runs(), key=lambda run: run.created_at)
    return [point.value for run in runs for point in run.history("eval")]


@pytest.mark.parametrize("job", ["1", "2"], ids=["same_job", "another_job"])
def test_spool_reaches_its_project_with_a_new_key(
    project: Project,
    real_service: tuple[str, Database],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
) -> None:
    """A key of another project leaves the spool where it is; a new key of the same project sends it."""
    other = make_project(*real_service, mode="shadow")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    log_run(project, create_revoked_key(project), 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    log_run(other, other.key, 0.2)
    assert list_evals(other) == [0.2]
    assert len([line for line in list_messages(caplog) if "another project" in line]) == 1
    log_run(project, project.key, 0.3)
    assert list_evals(project) == [0.1, 0.3]


def test_spool_of_an_unknown_key_is_sent(project: Project, tmp_path: Path) -> None:
    """What was logged with a mistyped key, or without one, reaches the project of the next key."""
    log_run(project, "esk_mistyped", 0.1)
    assert list_evals(project) == []
    log_run(project, "", 0.2)
    log_run(project, project.key, 0.3)
    assert list_evals(project) == [0.1, 0.2, 0.3]
    assert not list((tmp_path / "spool").glob("*/*"))

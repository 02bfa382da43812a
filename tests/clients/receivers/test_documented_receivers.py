"""The receivers of docs/receivers.md and the batch script of docs/slurm.md, run as they are printed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import running_program, wait_until
from tests.clients.receivers.fake_pull_endpoint import FakePullEndpoint
from tests.clients.webhooks import SECRET, make_event, make_stop_event, post_event

pytestmark = [pytest.mark.real, pytest.mark.nightly]

CANCEL = '#!/bin/sh\n[ "$1" = -- ] && echo "$2" >> {folder}/cancelled\n'
STATUS = "#!/bin/sh\n[ ! -e {folder}/checked ] && touch {folder}/checked\n"


@pytest.fixture
def environment(tmp_path: Path, server: FakeServer) -> dict[str, str]:
    """A scheduler that ends a job between the first check and the second."""
    for name, script in (("my-cancel", CANCEL), ("my-status", STATUS)):
        (tmp_path / name).write_text(script.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "EVALSTOP_URL": server.url,
        "EVALSTOP_KEY": KEY,
        "EVALSTOP_WEBHOOK_SECRET": SECRET,
    }


def test_receiver_in_30_lines_of_python(tmp_path: Path, environment: dict[str, str], service: FakeService) -> None:
    """It rejects bad signatures, carries out a stop once, checks until the job is gone, and reports."""
    code = read_block("30 lines")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with running_program([sys.executable, "-c", code], PORT=str(port), **environment):
        wait_until(lambda: accepts_connections(port))
        assert post_event(url, make_stop_event({"job_id": "8"}), secret="whsec_AAAA").status_code == 401
        assert post_event(url, make_stop_event({"job_id": "8"}), age_seconds=3_600).status_code == 401
        suspected = make_event("run.suspected", {"job_id": "9"})
        assert post_event(url, suspected, webhook_id="msg_2").status_code == 202
        for _ in range(2):
            assert post_event(url, make_stop_event({"job_id": "7; reboot"})).status_code == 202
        ((decision_id, report),) = wait_until(lambda: service.reports)
    assert (decision_id, report["state"]) == ("decision-1", "confirmed")
    assert (tmp_path / "cancelled").read_text() == "7; reboot\n"
    assert (tmp_path / "checked").exists()


@pytest.mark.parametrize("forged", [False, True])
def test_receiver_in_curl_and_bash(
    tmp_path: Path, environment: dict[str, str], service: FakeService, forged: bool
) -> None:
    """It fetches, verifies, cancels, checks, reports and settles; it ignores a forged event."""
    missing = [name for name in ("curl", "jq", "openssl", "bash") if shutil.which(name) is None]
    if missing:
        assert os.environ.get("CI") != "true", f"missing: {missing}"
        pytest.skip(f"missing: {missing}")
    endpoint = FakePullEndpoint(tmp_path)
    service.intercept = endpoint.answer
    if not forged:
        endpoint.add(make_event("run.suspected", {"job_id": "9"}), "d0")
    endpoint.add(make_stop_event({"job_id": "7; reboot"}), secret="whsec_AAAA" if forged else SECRET)
    script = read_block("bash")
    with running_program(["bash", "-c", script], ENDPOINT="e1", **environment) as process:
        if forged:
            assert process.wait(60) == 1
            assert not (tmp_path / "cancelled").exists()
            return
        ((decision_id, report),) = wait_until(lambda: service.reports)
        wait_until(lambda: len(endpoint.settlements) == 2)
    assert (decision_id, report["state"]) == ("decision-1", "confirmed")
    assert endpoint.settlements == [{"delivery_id": name, "attempt": 1, "status": 200} for name in ("d0", "d1")]
    assert (tmp_path / "cancelled").read_text() == "7; reboot\n"


@pytest.mark.parametrize(("ending", "exit_code"), [("print('end', flush=True)", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_batch_script_passes_the_signal_on(tmp_path: Path, ending: str, exit_code: int) -> None:
    """The trap of the page signals the trainer, waits for it, and exits with its exit code."""
    script = read_block("batch script")
    trainer = (
        "import os, signal, time; asked = []\n"  # os.write is safe in a signal handler, print is not
        "signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b'saved\\n'), asked.append(True)))\n"
        "os.write(1, b'up\\n')\n"
        "while not asked: time.sleep(0.05)\n"
        f"time.sleep(0.5); {ending}"
    )
    (tmp_path / "train.py").write_text(trainer)
    script = script.replace("python train.py", f"{sys.executable} {tmp_path}/train.py")
    with running_program(["bash", "-c", script]) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGUSR1)
        assert job.stdout.readline() == "saved\n"
        assert job.wait(60) == exit_code


def accepts_connections(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0

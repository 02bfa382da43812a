"""The quickstart, followed to the letter: one script in one shell, in a fresh folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.acceptance.docs.documents import ROOT, Block, blocks

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LISTEN = "127.0.0.1:9000"
PREAMBLE = """
set -uo pipefail
trap '[ $? = 143 ] || exit 1' ERR
"""
"""What fails ends the script, but for the receiver, which ends as its job did: by SIGTERM."""


def write_script(page: Path) -> str:
    """The blocks of a page that are steps, in the order in which they stand."""
    steps = [block for kind in ("sh", "python") for block in blocks(kind) if block.file == page and block.is_step]
    return PREAMBLE + "\n".join(map(_write_step, sorted(steps, key=lambda block: block.number)))


def _write_step(block: Block) -> str:
    return f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n" if block.kind == "python" else block.text


def test_the_quickstart_ends_with_stops_that_saved_something(tmp_path: Path) -> None:
    """Whoever follows it has one stop that was obeyed and one that was confirmed, hours saved, and nothing blocks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    plain |= {
        "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8",  # as `make run` has it
        "EVALSTOP_SPOOL": str(tmp_path / "spool"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    with (tmp_path / "log").open("w") as log:
        up = subprocess.Popen(command, cwd=tmp_path, env=plain, stdout=subprocess.PIPE, stderr=log, text=True)
    assert up.stdout is not None
    try:
        ready = json.loads(up.stdout.readline())
        script = write_script(ROOT / "docs/quickstart.md").replace(LISTEN, listen) + "\nevalstop doctor first-run\n"
        assert listen in script
        environment = plain | {"EVALSTOP_URL": ready["url"], "EVALSTOP_KEY": ready["key"]}
        done = subprocess.run(
            ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stderr, done.stderr
        headers = {"Authorization": f"Bearer {ready['key']}"}
        with httpx.Client(base_url=f"{ready['url']}/api/v1", headers=headers, trust_env=False) as api:
            found = api.get("/decisions").raise_for_status().json()["items"]
            figures = api.get("/precision").raise_for_status().json()
        assert sorted(decision["state"] for decision in found) == ["confirmed", "obeyed"]
        assert figures["groups"][0]["gpu_hours"]["saved"] > 0
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=30)
        up.stdout.close()

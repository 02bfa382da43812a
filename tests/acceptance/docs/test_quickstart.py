"""The quickstart, followed literally as one script in an empty folder, but for a port and the pace of a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.acceptance.docs.documents import ROOT, Block, list_blocks
from tests.fixtures.forked_commands import ForkedCommand
from tests.fixtures.free_ports import find_free_ports
from tests.service.commands import run_evalstop

pytestmark = pytest.mark.real

LISTEN, PACE = "127.0.0.1:9000", "--hasten 2"
"""What is replaced: by a free port, and by a tenth of the steps to the turn, with many to stop after it."""

SCRIPT_HEADER = """
set -uo pipefail
trap '[ $? = 143 ] || exit 1' ERR
"""
"""A failing command ends the script, except the receiver, which exits as its job did: by SIGTERM."""


def find_free_address() -> str:
    """A loopback address on which nothing listens."""
    (port,) = find_free_ports(1)
    return f"127.0.0.1:{port}"


def write_script(page: Path) -> str:
    """A script of a page's steps, in the order of the page."""
    steps = [
        block
        for language in ("sh", "python")
        for block in list_blocks(language)
        if block.file == page and block.is_step
    ]
    return SCRIPT_HEADER + "\n".join(map(_write_step, sorted(steps, key=lambda block: block.number)))


def _write_step(block: Block) -> str:
    return f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n" if block.language == "python" else block.text


@pytest.mark.parametrize(
    "has_demo_data", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["empty", "demo data"]
)
def test_quickstart_ends_with_two_stops(tmp_path: Path, has_demo_data: bool) -> None:
    """Following the quickstart gives an obeyed and a confirmed stop, and GPU-hours saved, beside example runs too."""
    listen = find_free_address()
    base_environment = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    base_environment |= {
        "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8",  # as set by `make run`
        "EVALSTOP_SPOOL": str(tmp_path / "spool"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    data = ["--data-folder", str(tmp_path / ".evalstop")]
    if has_demo_data:
        filled = run_evalstop(base_environment, "demo-data", *data, "--runs", "13")
        assert filled.returncode == 0, filled.stderr
    command = ["up", "--json", "--port", "0", *data]
    up = ForkedCommand(command, base_environment, tmp_path / "log")
    try:
        ready = json.loads(up.stdout.readline())
        script = write_script(ROOT / "docs/quickstart.md").replace(LISTEN, listen)
        assert PACE in script
        script = script.replace(PACE, "--hasten 20 --steps 100000") + "\nevalstop doctor first-run\n"
        assert listen in script
        environment = base_environment | {"EVALSTOP_URL": ready["url"], "EVALSTOP_KEY": ready["key"]}
        result = subprocess.run(
            ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr, result.stderr
        headers = {"Authorization": f"Bearer {ready['key']}"}
        with httpx.Client(base_url=f"{ready['url']}/api/v1", headers=headers, trust_env=False, timeout=60) as api:
            decisions = api.get("/decisions", params={"limit": 2}).raise_for_status().json()["items"]
            precision = api.get("/precision", params={"policy": "paper"}).raise_for_status().json()
        assert [decision["state"] for decision in decisions] == ["confirmed", "obeyed"]
        assert precision["groups"][0]["gpu_hours"]["saved"] > 0
    finally:
        up.terminate()
        up.wait(60)
        up.stdout.close()

"""A running service for the examples of the documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an example: a running `evalstop up`, and a temporary folder for what the example writes."""
    folder = tmp_path_factory.mktemp("service")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    environment["EVALSTOP_WEBHOOK_NETWORKS"] = "127.0.0.0/8"  # as set by `make run`
    environment["EVALSTOP_HELD_OUT_SHARE"] = "0"  # examples that show a stop need one every time
    environment["EVALSTOP_MAX_MODE"] = "enforce"
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    log = folder / "log"
    with log.open("w") as errors:
        up = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert up.stdout is not None
    try:
        line = up.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        yield environment | {
            "EVALSTOP_URL": ready["url"],
            "EVALSTOP_KEY": ready["key"],
            "EVALSTOP_SPOOL": str(folder / "spool"),
            "EVALSTOP_DATA_FOLDER": str(folder / ".evalstop"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=30)
        up.stdout.close()

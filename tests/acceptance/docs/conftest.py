"""The documents, and a service for their examples to talk to."""

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
    """An environment in which `evalstop up` answers and everything that an example writes goes to a folder of ours."""
    folder = tmp_path_factory.mktemp("service")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    plain["EVALSTOP_WEBHOOK_NETWORKS"] = "127.0.0.0/8"  # as `make run` has it
    plain["EVALSTOP_HELD_OUT_SHARE"] = "0"  # an example that shows a stop is not to leave it to chance
    plain["EVALSTOP_MAX_MODE"] = "enforce"
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    log = folder / "log"
    with log.open("w") as errors:
        up = subprocess.Popen(command, cwd=folder, env=plain, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert up.stdout is not None
    try:
        said = up.stdout.readline()
        assert said, log.read_text()
        ready = json.loads(said)
        yield plain | {
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

"""A running service for the examples of the documents."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.forked_service import running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an example: a running `evalstop up`, and a temporary folder for what the example writes."""
    folder = tmp_path_factory.mktemp("service")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    with running_service(folder / ".evalstop") as up:
        yield inherited | {
            "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8",  # as set by `make run`
            "EVALSTOP_HELD_OUT_SHARE": "0",  # examples that show a stop need one every time
            "EVALSTOP_MAX_MODE": "enforce",
            "EVALSTOP_VETO_WINDOW_SECONDS": "0",
            "EVALSTOP_URL": up.url,
            "EVALSTOP_KEY": up.key,
            "EVALSTOP_SPOOL": str(folder / "spool"),
            "EVALSTOP_DATA_FOLDER": str(folder / ".evalstop"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

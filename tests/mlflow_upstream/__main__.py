"""Runs MLflow's own tests against this service: `python -m tests.mlflow_upstream CHECKOUT [PYTEST_ARGUMENT ...]`.

`CHECKOUT` is a copy of MLflow's repository, of which only `tests/` is read; `MLFLOW_PYTHON` is an interpreter that has
the same release of MLflow and pytest. The bodies of the tests stay as they are: `plugin.py`, which runs in that
interpreter, gives each server that a test starts a fresh project of the one service that runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from evalstop_service.clock import utc_now
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_named_key, create_project

PROJECTS = 400

REST = "tests/tracking/test_rest_tracking.py"
FLUENT = "tests/tracking/fluent/test_fluent.py"
TRACKING = "tests/tracking/test_tracking.py"

REST_TESTS = Path(__file__).with_name("rest_tests.txt")
"""The tests of `test_rest_tracking.py` on experiments, runs, metrics, params, tags, search and artifacts; the others
are on deleting and renaming, which are not here, on models and inputs, which are accepted and not kept, and on traces,
the gateway and others that are not here."""


def run_tests(checkout: Path, arguments: list[str]) -> int:
    """The exit status of pytest."""
    selection = arguments or [FLUENT, TRACKING, *(f"{REST}::{name}" for name in REST_TESTS.read_text().split())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # As MLflow's own tests do, which read what was logged as files.
        settings = Settings(data_folder=folder, mlflow_artifact_root=(folder / "artifacts").as_uri())
        database = Database(settings.url)
        schema.upgrade_schema(database)
        keys = [_create_project_key(database, f"mlflow-{number}") for number in range(PROJECTS)]
        with start_server(database, settings) as url:
            environment = os.environ | {
                "EVALSTOP_UPSTREAM": json.dumps({"url": f"{url}/mlflow", "keys": keys}),
                "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{checkout}",
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
                "NETRC": str(folder / "netrc"),
            }
            status = subprocess.call(
                [
                    *(os.environ.get("MLFLOW_PYTHON", sys.executable), "-m", "pytest", "-p", "plugin", "-q"),
                    *(
                        "-p",
                        "no:cacheprovider",
                        "--no-showlocals",
                        "--tb=short",
                        f"--junitxml={folder / 'results.xml'}",
                    ),
                    *(f"--rootdir={checkout}", "-o", "addopts=", "-o", "timeout=120", *selection),
                ],
                cwd=checkout,
                env=environment,
            )
        database.close()
        _print_counts(folder / "results.xml")
    return status


def _print_counts(results: Path) -> None:
    """Print how many tests of each file pass, and the names of the others. One with parameters passes with all."""
    failed: dict[str, dict[str, bool]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        tests = failed.setdefault(case.get("classname", ""), {})
        name = case.get("name", "").partition("[")[0]
        tests[name] = tests.get(name, False) or any(case.find(kind) is not None for kind in ("failure", "error"))
    for module, tests in failed.items():
        names = sorted(name for name, has_failed in tests.items() if has_failed)
        print(f"{module}: {len(tests) - len(names)} of {len(tests)} pass; not {' '.join(names) or 'any fails'}")


def _create_project_key(database: Database, project: str) -> str:
    create_project(database, project, "shadow", 0.0, utc_now())
    return create_named_key(database, project, "tests", SCOPES, utc_now())[1]


if __name__ == "__main__":
    sys.exit(run_tests(Path(sys.argv[1]).resolve(), sys.argv[2:]))

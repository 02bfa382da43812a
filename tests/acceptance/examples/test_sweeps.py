"""Groups of runs that are compared: populations, searches; and a run that is parked and resumed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_client import Run
from evalstop_lab.service_process import Service
from evalstop_service.background import PeriodicJob, Wait, run_jobs
from evalstop_service.clock import utc_now
from evalstop_service.decisions import sweeps

from tests.acceptance.examples.conftest import build_environment, open_api
from tests.acceptance.examples.programs import END_LINE, EXAMPLES, run_example
from tests.clients.programs import wait_until
from tests.clients.real_service import make_project, running_service

pytestmark = pytest.mark.real

RULE = {"kind": "pbt", "mode": "enforce", "ready_steps": 10, "hyperparameters": {"rate": {"factors": [0.5]}}}

RESTARTED_TRAINER = f"""
import json, os, time
import evalstop

first_step = int(os.environ.get("EVALSTOP_EXPLOIT_STEP", 0))
config = {{"rate": 0.001}} | json.loads(os.environ.get("EVALSTOP_EXPLOIT_HYPERPARAMETERS", "{{}}"))
terms = {{"group": "restarted", "population": {RULE!r}, "mode": "enforce", "resume": "allow"}}
with evalstop.init("lagging", eval="score", config=config, **terms) as run:
    for step in range(first_step + 1, first_step + 11 if first_step else 10_000):
        run.log({{"score": step * config["rate"]}}, step=step)
        time.sleep(0.1)
print(os.environ.get("EVALSTOP_EXPLOIT_CHECKPOINT"), config, flush=True)
"""
"""Loads a checkpoint only when it starts."""


@pytest.fixture
def compared(migrated_file: Path, tmp_path: Path) -> Iterator[Service]:
    """A service that compares the runs of groups ten times a second, beside its own comparisons."""
    with running_service(migrated_file, tmp_path) as (url, database):
        job = sweeps.create_job(database, utc_now)

        def compare(pause: Wait) -> float:
            job.do(pause)
            return 0.1

        with run_jobs(PeriodicJob("quick sweeps", compare)):
            yield Service(url, make_project(url, database, mode="enforce").key)


def read_group(service: Service, name: str) -> dict[str, Any]:
    with open_api(service) as api:
        group: dict[str, Any] = api.get(f"/groups/{name}").raise_for_status().json()
    return group


def test_population_copies_its_better_members(compared: Service, tmp_path: Path) -> None:
    """Slow learners continue from checkpoints that exist, near the rates of their sources, and end better than alone;
    each copy is a confirmed decision, and an attempt of its own."""
    environment = build_environment(compared, tmp_path) | {"EXAMPLE_PAUSE": "0.1"}
    output = run_example([sys.executable, str(EXAMPLES / "population.py")], environment, tmp_path)
    group = read_group(compared, "population")
    members = {member["name"]: member for member in group["members"]}
    assert len(members) == 5
    copies = [(member, copy) for member in members.values() for copy in member["descent"]]
    assert sorted(f"{member['name']}: continues {copy['source_name']}" for member, copy in copies) == sorted(
        re.findall(r"population-\S+: continues \S+", output)
    )
    assert copies, "nothing was copied"
    for member, copy in copies:
        assert Path(copy["source_checkpoint"].removeprefix("file://")).exists()
        assert copy["source_run"] == members[copy["source_name"]]["run_id"]
        assert 0 < copy["hyperparameters"]["rate"] <= 0.02
        assert member["attempt"] == 1 + len(member["descent"])
    assert {(item["action"], item["state"]) for item in group["decisions"]} >= {("exploit", "confirmed")}
    (slowest,) = re.findall(r"population-1e-05: ended at step 500 with a loss of (\S+)", output)
    assert float(slowest) < 1, "alone it would end with a loss of 5.6"


def assert_laggard_is_pruned(service: Service, group: str, output: str) -> None:
    """The trial with the smallest rate is stopped by the rule, and the others have their time."""
    ends = dict(re.findall(r"rate (\S+): ended at step (\d+) of 40", output))
    assert int(ends.pop("0.001")) < 40
    assert set(ends.values()) == {"40"}
    (decision,) = read_group(service, group)["decisions"]
    assert (decision["action"], decision["state"]) == ("stop", "obeyed")


@pytest.mark.nightly
@pytest.mark.parametrize(("example", "group"), [("optuna_search", "optuna-search"), ("ray_tune_group", "ray-search")])
def test_trial_that_lags_behind_the_median_is_ended(
    example: str, group: str, service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    """A search's trials report to a group, whose rule ends the one that lags behind its siblings at equal steps."""
    output = run_example([sys.executable, str(EXAMPLES / f"{example}.py")], environment, tmp_path)
    assert_laggard_is_pruned(service, group, output)
    assert len(END_LINE.findall(output)) == 4


@pytest.mark.nightly
def test_receiver_restarts_a_trainer_for_a_copy(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """A trainer that cannot load a checkpoint while it runs is restarted with what to load; the new attempt descends
    from the source, and holds nothing that was logged before the copy."""
    secret, ready = tmp_path / "secret", tmp_path / "ready.json"
    secret.write_text("whsec_bm90IHlldCBrbm93biwgdGhpcyBpcyBhIHBsYWNl")
    command = ["evalstop-receiver", "process", "--restartable", "--secret-file", str(secret)]
    command += ["--ready-file", str(ready), "--job-key-env", "TRAINER_KEY"]
    command += ["--", sys.executable, "-c", RESTARTED_TRAINER]
    keys = environment | {"TRAINER_KEY": service.key}
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(open_api(service))
        terms: dict[str, Any] = {"group": "restarted", "population": RULE, "config": {"rate": 0.01}, "mode": "enforce"}
        for name in ("first", "second", "third"):
            sibling = stack.enter_context(
                Run(
                    name,
                    metrics={"score": {"role": "eval"}},
                    url=service.url,
                    key=service.key,
                    spool_folder=tmp_path,
                    **terms,
                )
            )
            for step in range(1, 501):  # runs are compared at equal steps, and the first look may come after seconds
                sibling.log({"score": step * 0.01}, step=step)
            sibling.checkpoint(f"file:///{name}/10", step=10)
            assert sibling.flush(60)
        receiver = stack.enter_context(
            subprocess.Popen(command, env=keys, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        )
        try:
            wait_until(ready.exists, 60.0)
            endpoint = {"url": json.loads(ready.read_text())["url"], "event_types": ["run.exploit_requested"]}
            secret.write_text(api.post("/endpoints", json=endpoint).raise_for_status().json()["secret"])
            output, _ = receiver.communicate(timeout=120)
        finally:
            receiver.send_signal(signal.SIGTERM)
        lagging = next(member for member in read_group(service, "restarted")["members"] if member["name"] == "lagging")
        observations = api.get(f"/runs/{lagging['run_id']}/observations", params={"metric": "score"}).json()["items"]
    assert receiver.returncode == 0
    (copy,) = lagging["descent"]
    assert output.splitlines()[-1] == f"{copy['source_checkpoint']} {{'rate': 0.005}}"
    assert (lagging["attempt"], lagging["status"], copy["source_step"]) == (2, "completed", 10)
    current = {item["step"]: item["value"] for item in observations}
    assert current == {
        **{step: step * 0.001 for step in range(1, 11)},
        **{step: step * 0.005 for step in range(11, 21)},
    }


NAME = "park-and-resume"
EVENT_TYPES = ["run.park_requested", "run.resume_requested", "run.stop_requested"]


@pytest.mark.nightly
def test_parked_run_resumes_and_improves(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """The receiver parks the job and resumes it on request; the run ends with a better checkpoint than when parked."""
    secret, ready = tmp_path / "secret", tmp_path / "ready.json"
    secret.write_text("whsec_bm90IHlldCBrbm93biwgdGhpcyBpcyBhIHBsYWNl")
    command = ["evalstop-receiver", "process", "--restartable", "--secret-file", str(secret)]
    command += ["--ready-file", str(ready), "--job-key-env", "TRAINER_KEY"]
    command += ["--", sys.executable, str(EXAMPLES / "park_and_resume.py")]
    with (
        open_api(service) as api,
        subprocess.Popen(
            command,
            env=environment | {"TRAINER_KEY": service.key},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        ) as receiver,
    ):
        try:
            wait_until(ready.exists, 60.0)
            endpoint = {"url": json.loads(ready.read_text())["url"], "event_types": EVENT_TYPES}
            secret.write_text(api.post("/endpoints", json=endpoint).raise_for_status().json()["secret"])
            parked = wait_until(lambda: find_run(api, "parked"), 120.0)
            decision = parked["decision"]
            assert (decision["action"], decision["state"], parked["should_stop"]) == ("park", "parked", False)
            assert parked["last_step"] < parked["total_steps"]
            body = {"reason": "the learning rate was raised, so a dip was expected"}
            api.post(f"/decisions/{decision['id']}/undo", json=body).raise_for_status()
            output, _ = receiver.communicate(timeout=200)
        finally:
            receiver.send_signal(signal.SIGTERM)
        completed = wait_until(lambda: find_run(api, "completed"), 60.0)
    assert receiver.returncode == 0
    assert re.search(r"resumed at step \d+", output), "the job did not resume from its checkpoint"
    assert "completed" in output
    assert completed["last_step"] == completed["total_steps"]
    assert completed["decision"]["id"] == decision["id"], "the run was parked again after a person resumed it"
    assert completed["best_checkpoint"]["score"] < parked["best_checkpoint"]["score"], (
        "the eval is a loss, so lower is better"
    )


@pytest.mark.nightly
def test_finished_example_can_be_started_again(environment: dict[str, str], tmp_path: Path) -> None:
    """It ends at once, and does not take the checkpoints of another example in the same folder for its own."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "99950.json").write_text(json.dumps([0.0] * 40))
    command = [sys.executable, str(EXAMPLES / "park_and_resume.py")]
    first, second = (run_example(command, environment | {"EXAMPLE_PAUSE": "0"}, tmp_path) for _ in range(2))
    assert "resumed" not in first
    assert "resumed at step 1500" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]


def find_run(api: httpx.Client, status: str) -> dict[str, Any]:
    """The example's run in this status; empty if there is none."""
    runs = api.get("/runs", params={"name": NAME}).raise_for_status().json()["items"]
    return next((dict(run) for run in runs if run["status"] == status), {})

"""Every page that connects a trainer or scheduler, followed literally: each ends with a stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from evalstop_detectors import GroupRule, check_rule

from tests.acceptance.docs import trainer_snippets
from tests.acceptance.docs.connect_pages import PAGES, TESTED_BLOCKS, UNTESTED_BLOCKS, find_blocks, read_block
from tests.acceptance.docs.documents import ROOT, read_blocks
from tests.acceptance.docs.test_quickstart import find_free_address, write_script
from tests.clients.programs import running_program, wait_until
from tests.clients.test_tensorboard import append_events, encode_event
from tests.service.commands import run_evalstop

TIMEOUT_SECONDS = 120.0
FALLING_SCORES = (0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: the policy `paper` stops at the last one."""

STRICT_CURL = 'curl() { command curl --fail-with-body "$@"; }\n'

SLEEPING_JOB = [sys.executable, "-c", "import signal; signal.pause()"]
CANCEL_SCRIPT = '#!/bin/sh\n[ "$1" = -- ] && shift\nkill "$1"\n'
STATUS_SCRIPT = '#!/bin/sh\n[ "$1" = -- ] && shift\nkill -0 "$1" 2>/dev/null || exit 3\n'


@dataclass(frozen=True)
class Project:
    """A new project of the service, a folder, and the environment variables that the pages export."""

    api: httpx.Client
    folder: Path
    environment: dict[str, str]

    def run_shell(self, script: str, **variables: str) -> str:
        """Run a script; returns its output. A failing command or a warning of EvalStop fails the test."""
        command = ["bash", "-euo", "pipefail", "-c", STRICT_CURL + script]
        result = subprocess.run(
            command, env=self.environment | variables, cwd=self.folder, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr, result.stderr
        return result.stdout

    def run_python(self, code: str, **variables: str) -> None:
        """Run a Python program."""
        (self.folder / "program.py").write_text(code)
        self.run_shell("python program.py", **variables)

    def find_run(self, name: str) -> dict[str, Any]:
        """The newest run with this name; empty if there is none."""
        runs = self.api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
        return dict(runs[0]) if runs else {}

    def add_endpoint(self, url: str) -> str:
        """Register a webhook endpoint; returns its secret."""
        return self.run_shell(f"evalstop endpoint add {url}").strip()

    def start_program(self, script: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Run a script in the background until the block ends."""
        return running_program(["bash", "-c", f"cd {self.folder}; {script}"], **self.environment | variables)

    def wait_for_decision(self, name: str, state: str) -> None:
        """Wait until the decision on a run is in this state."""
        wait_until(lambda: ((self.find_run(name) or {}).get("decision") or {}).get("state") == state, TIMEOUT_SECONDS)

    def post_falling_evals(self, run: dict[str, Any], post: Callable[[int, float], dict[str, Any]]) -> None:
        """Post falling evals until the answer is to stop, and finish the run with that decision."""
        for step, value in enumerate(FALLING_SCORES, start=200):
            answer = post(step, value)
        assert answer["should_stop"]
        decision = self.find_run(run["name"])["decision"]["id"]
        body = {"status": "completed", "obeyed": decision}
        self.api.post(f"/runs/{run['id']}/finish", json=body).raise_for_status()

    def check_stopped(self, name: str, state: str) -> None:
        """Check that the run was stopped, that the stop saved GPU-hours, and that `doctor` finds no obstacle."""
        decision = self.find_run(name)["decision"]
        assert decision is not None, self.run_shell("evalstop doctor " + name)
        assert decision["state"] == state, decision
        self.api.post(f"/decisions/{decision['id']}/outcome", json={"outcome": "right"}).raise_for_status()
        assert "nothing blocks a stop" in self.run_shell(f"evalstop doctor {name}")
        saved = self.api.get("/precision").raise_for_status().json()["groups"][0]["gpu_hours"]["saved"]
        assert saved > 0


@pytest.fixture(scope="module")
def installation_key(service: dict[str, str]) -> str:
    """A key that may create projects."""
    words = ("admin", "key", "create", "--installation", "--name", "tests", "--scopes", "admin")
    created = run_evalstop(service, *words)
    assert created.returncode == 0, created.stderr
    return created.stdout.strip()


@pytest.fixture
def project(service: dict[str, str], installation_key: str, tmp_path: Path) -> Iterator[Project]:
    """A project in enforce mode without a veto window or hold-out, so that every stop is carried out at once."""
    base = f"{service['EVALSTOP_URL']}/api/v1"
    with httpx.Client(base_url=base, timeout=30, trust_env=False) as api:
        api.headers["Authorization"] = f"Bearer {installation_key}"
        body: dict[str, object] = {"name": uuid.uuid4().hex, "default_mode": "enforce", "default_policy": "paper"}
        body |= {"held_out_share": 0, "veto_window_seconds": 0}
        created = api.post("/projects", json=body).raise_for_status().json()
        scopes = {"name": "first", "scopes": ["ingest", "read", "report", "operate", "admin"]}
        key = api.post(f"/projects/{created['id']}/keys", json=scopes).raise_for_status().json()["key"]
        api.headers["Authorization"] = f"Bearer {key}"
        project_environment = {
            "EVALSTOP_KEY": key,
            "EVALSTOP_SPOOL": str(tmp_path / "spool"),
            "XDG_STATE_HOME": str(tmp_path),
        }
        for name, script in (("my-cancel", CANCEL_SCRIPT), ("my-status", STATUS_SCRIPT)):
            (tmp_path / name).write_text(script)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{service['PATH']}"
        yield Project(api, tmp_path, service | project_environment | {"EVALSTOP_LABELS": "gpus=8", "PATH": path})


def test_pages_are_those_of_the_menu() -> None:
    """PAGES has every page below the Connect headings of the site's menu."""
    menu = re.findall(r"^  - (.+):$|^      - (?:.+: )?(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    heading, connecting = "", set()
    for title, page in menu:
        heading = title or heading
        if page and heading.startswith("Connect"):
            connecting.add(f"docs/{page}")
    assert connecting == {*PAGES} - {"README", "docs/quickstart"}


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_is_tested_or_has_a_reason(page: str) -> None:
    """Each code block is a step, or tested, or listed with a reason; words name one block each."""
    known = [tested.words for tested in TESTED_BLOCKS.values() if tested.page == page]
    known += [words for of_page, words in UNTESTED_BLOCKS if of_page == page]
    assert [len(find_blocks(page, words)) for words in known] == [1] * len(known), known
    blocks = [block for block in read_blocks(ROOT / f"{page}.md") if block.language and not block.is_step]
    assert [str(block) for block in blocks if not any(words in block.text for words in known)] == []
    for name, tested in TESTED_BLOCKS.items():
        assert f'"{name}"' in (ROOT / tested.test).read_text(), name


def test_documented_rule_of_a_population_is_valid() -> None:
    """The rule that the page on sweeps shows has known keys, in their ranges."""
    check_rule(msgspec.json.decode(read_block("rule of a population"), type=GroupRule))


def test_pod_labels_use_variables_that_the_pods_set() -> None:
    """The labels for MLflow refer to environment variables that the page's pods define."""
    (variable,) = yaml.safe_load(read_block("mlflow pod labels"))
    labels = json.loads(variable["value"])
    manifests = [yaml.safe_load(read_block(name)) for name in ("pods of jobs", "other pods")]
    defined = {variable["name"] for manifest in manifests for variable in manifest["env"]}
    assert {value.strip("$()") for value in labels.values()} <= defined
    assert set(labels) == {"kubernetes_namespace", "kubernetes_kind", "kubernetes_name"}


@pytest.mark.real
def test_readme_ends_with_a_stop(project: Project) -> None:
    """The README's loop is stopped in a project with default settings, after the command that the README gives."""
    project.run_shell("evalstop project set default_policy=default default_mode=shadow max_mode=shadow")
    (command,) = re.findall(r"`(evalstop project set [^`]+)`", (ROOT / "README.md").read_text())
    project.run_shell(command)
    (block,) = (block for block in read_blocks(ROOT / "README.md") if block.is_step)
    project.run_python(trainer_snippets.EVALUATE_FUNCTION + block.text)
    project.check_stopped("ppo-7b-seed3", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
def test_http_ends_with_a_stop(project: Project) -> None:
    """A run opened as docs/ways-in.md says is stopped."""
    project.run_shell(write_script(ROOT / "docs/ways-in.md"))
    body = {"name": "curl-1", "metrics": "auto", "total_steps": 10_000, "labels": {"gpus": "8"}}
    second_run = project.api.post("/runs", json=body).raise_for_status().json()
    assert second_run["name"] == "curl-1-2"

    def post(step: int, value: float) -> dict[str, Any]:
        body = {"observations": [{"metric": "eval_accuracy", "step": step, "value": value}]}
        return dict(project.api.post(f"/runs/{second_run['id']}/observations", json=body).raise_for_status().json())

    project.post_falling_evals(second_run, post)
    project.check_stopped("curl-1-2", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
def test_observations_of_many_runs_end_with_a_stop(project: Project) -> None:
    """Of the two runs of the page's request, one falls and is stopped."""
    project.run_shell(write_script(ROOT / "docs/http.md"))
    falling_run = project.find_run("seed-1")

    def post(step: int, value: float) -> dict[str, Any]:
        points = [{"metric": "eval", "step": step, "value": value}]
        body = {"runs": [{"run_id": falling_run["id"], "observations": points}]}
        answer = project.api.post("/observations", json=body).raise_for_status()
        return dict(answer.json()["runs"][0])

    project.post_falling_evals(falling_run, post)
    project.check_stopped("seed-1", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("name", ["declared", "several evals"])
def test_declared_roles_end_with_a_stop(name: str, project: Project) -> None:
    """A run with one declared eval is stopped, and so is one with several that fall together."""
    project.run_shell(write_script(ROOT / "docs/roles.md"))
    (project.folder / "declare.py").write_text(read_block(name) + trainer_snippets.RUN_WITH_DECLARED_METRICS)
    project.run_shell("python declare.py declared")
    project.check_stopped("declared", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
def test_park_policy_and_its_endpoint(project: Project) -> None:
    """The page's park policy is stored, and its endpoint, in place of one that stops, subscribes to park requests."""
    project.add_endpoint("http://127.0.0.1:9000/")
    project.run_shell(read_block("endpoint that parks").replace("login-node", "127.0.0.1"))
    assert "run.park_requested" in project.run_shell("evalstop endpoint ls")
    project.api.post("/policies", json=json.loads(read_block("parks"))).raise_for_status()
    assert "aside " in project.run_shell("evalstop policy ls")


@pytest.mark.nightly
@pytest.mark.real
def test_client_tab_ends_with_a_stop(project: Project) -> None:
    """A custom loop polls the service and ends."""
    evaluate = trainer_snippets.EVALUATE_FUNCTION.replace(", 0.01, step / 1000", "")
    project.run_python(evaluate + read_block("client tab"))
    project.check_stopped("client-1", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
def test_mlflow_tab_ends_with_a_stop(project: Project) -> None:
    """A script that polls its tags is stopped, and its run has the labels that docs/mlflow.md sets for a Slurm job."""
    script = read_block("mlflow should_stop") + trainer_snippets.LOG_TO_MLFLOW + trainer_snippets.STOP_BY_MLFLOW_TAG
    (project.folder / "train.py").write_text(script)
    exported = read_block("mlflow slurm labels")
    project.run_shell(exported + read_block("mlflow tab"), SLURM_JOB_ID="7", SLURM_CLUSTER_NAME="c")
    assert project.find_run("logged")["labels"].items() >= {"slurm_job_id": "7", "slurm_cluster": "c"}.items()
    project.check_stopped("logged", "obeyed")


@pytest.mark.nightly
@pytest.mark.real
def test_mlflow_client_that_never_polls_is_terminated(project: Project) -> None:
    """The process receiver that started the script terminates it and confirms the stop."""
    (project.folder / "logs.py").write_text(trainer_snippets.LOG_TO_MLFLOW + trainer_snippets.WAIT_FOR_SIGNAL)
    exported = read_block("mlflow address").replace("http://127.0.0.1:8787", project.environment["EVALSTOP_URL"])
    listen = find_free_address()
    receiver = f"exec evalstop-receiver process --listen {listen} --job-key-env EVALSTOP_KEY -- python logs.py"
    with project.start_program(
        exported + receiver, EVALSTOP_WEBHOOK_SECRET=project.add_endpoint(f"http://{listen}/")
    ) as receiver_process:
        assert receiver_process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGTERM
    project.check_stopped("logged", "confirmed")


@pytest.mark.nightly
@pytest.mark.real
def test_jobs_watched_by_tensorboard_files_are_terminated(project: Project) -> None:
    """Runs watched from their event files are stopped by the command receiver, which finds jobs by labels."""
    for number, value in enumerate(FALLING_SCORES):
        for folder in ("runs/a", "old-runs/b"):
            append_events(project.folder / folder / "events.out.tfevents.1", encode_event(number, eval_accuracy=value))
        append_events(
            project.folder / "logs/validation/events.out.tfevents.1", encode_event(number, epoch_loss=1 - value)
        )
    watch_folder, watch_one_run, import_past_run = read_block("tensorboard").splitlines()
    listen = find_free_address()
    receiver_command = read_block("any scheduler").strip()
    receiver = f"exec {receiver_command} --listen {listen} --poll-seconds 0.1"
    with ExitStack() as stack:
        secret = project.add_endpoint(f"http://{listen}/")
        stack.enter_context(project.start_program(receiver, EVALSTOP_WEBHOOK_SECRET=secret))
        for watch_command, name in ((watch_folder, "runs/a"), (watch_one_run, "classifier")):
            job = stack.enter_context(running_program(SLEEPING_JOB))
            labels = "scheduler=mine,user=ann,gpus=8"  # job_id is given by an option, as on the page
            command = f"exec {watch_command} --label job_id={job.pid} --total-steps 1000"
            stack.enter_context(project.start_program(command, EVALSTOP_LABELS=labels))
            assert job.wait(TIMEOUT_SECONDS) == -signal.SIGTERM
            project.wait_for_decision(name, "confirmed")
            project.check_stopped(name, "confirmed")
    project.run_shell(import_past_run)
    assert project.find_run("old-runs/b")["status"] == "completed"

"""README and every page that connects something, to the letter: each ends with a stop and no question."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evalstop
import httpx
import pytest
import yaml

from tests.acceptance.docs import trainer_snippets
from tests.acceptance.docs.connect_pages import FOLLOWED, NOT_RUN, PAGES, find_blocks, read_block
from tests.acceptance.docs.documents import ROOT, blocks_of
from tests.acceptance.docs.test_quickstart import write_script
from tests.clients.programs import running_program, wait_until
from tests.clients.test_tensorboard import event, write

pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 120.0
FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: `paper`, by which the projects here judge, stops at the last."""

CURL = 'curl() { command curl --fail-with-body "$@"; }\n'

JOB = [sys.executable, "-c", "import signal; signal.pause()"]
CANCEL = '#!/bin/sh\n[ "$1" = -- ] && shift\nkill "$1"\n'
STATUS = '#!/bin/sh\n[ "$1" = -- ] && shift\nkill -0 "$1" 2>/dev/null || exit 3\n'


@dataclass(frozen=True)
class Project:
    """A new project of the service, a folder, and an environment as the pages have one export it."""

    api: httpx.Client
    folder: Path
    environment: dict[str, str]

    def shell(self, script: str, **variables: str) -> str:
        """What a script prints in one shell; what fails in it ends it and the test, and so does a warning of ours."""
        command = ["bash", "-euo", "pipefail", "-c", CURL + script]
        done = subprocess.run(
            command, env=self.environment | variables, cwd=self.folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stderr, done.stderr
        return done.stdout

    def python(self, code: str, **variables: str) -> None:
        """Run a program."""
        (self.folder / "program.py").write_text(code)
        self.shell("python program.py", **variables)

    def run(self, name: str) -> dict[str, Any]:
        """The newest run that is called so."""
        found = self.api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
        return dict(found[0]) if found else {}

    def subscribe(self, url: str) -> str:
        """Tell the service of a receiver; gives the secret that signs."""
        return self.shell(f"evalstop endpoint add {url}").strip()

    def program(self, script: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """A script that goes on until the block ends, or it does."""
        return running_program(["bash", "-c", f"cd {self.folder}; {script}"], **self.environment | variables)

    def wait_for(self, name: str, state: str) -> None:
        """Wait until the decision on a run is in this state."""
        wait_until(lambda: ((self.run(name) or {}).get("decision") or {}).get("state") == state, PATIENCE_SECONDS)

    def report(self, run: dict[str, Any], post: Callable[[int, float], dict[str, Any]]) -> None:
        """Post falling evals until the answer says stop, and end the run for that decision, as the pages tell."""
        for step, value in enumerate(FALLING, start=200):
            answer = post(step, value)
        assert answer["should_stop"]
        decision = self.run(run["name"])["decision"]["id"]
        body = {"status": "completed", "obeyed": decision}
        self.api.post(f"/runs/{run['id']}/finish", json=body).raise_for_status()

    def check_stopped(self, name: str, state: str) -> None:
        """The run was stopped; said to be right, the stop has saved hours, and nothing stands in the way."""
        decision = self.run(name)["decision"]
        assert decision is not None, self.shell("evalstop doctor " + name)
        assert decision["state"] == state, decision
        self.shell(f"evalstop decisions label {name} right")
        assert "nothing blocks a stop" in self.shell(f"evalstop doctor {name}")
        saved = self.api.get("/precision").raise_for_status().json()["groups"][0]["gpu_hours"]["saved"]
        assert saved > 0


@pytest.fixture(scope="session")
def installation(service: dict[str, str]) -> str:
    """A key that makes projects."""
    words = ["evalstop", "admin", "key", "create", "--installation", "--name", "tests", "--scopes", "admin"]
    return subprocess.run(words, env=service, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(service: dict[str, str], installation: str, tmp_path: Path) -> Iterator[Project]:
    """Every stop in it is carried out at once."""
    base = f"{service['EVALSTOP_URL']}/api/v1"
    with httpx.Client(base_url=base, timeout=30, trust_env=False) as api:
        api.headers["Authorization"] = f"Bearer {installation}"
        body = {"name": uuid.uuid4().hex, "default_mode": "enforce", "default_policy": "paper", "held_out_share": 0}
        made = api.post("/projects", json=body).raise_for_status().json()
        scopes = {"name": "first", "scopes": ["ingest", "read", "report", "operate", "admin"]}
        key = api.post(f"/projects/{made['id']}/keys", json=scopes).raise_for_status().json()["key"]
        api.headers["Authorization"] = f"Bearer {key}"
        own = {"EVALSTOP_KEY": key, "EVALSTOP_SPOOL": str(tmp_path / "spool"), "XDG_STATE_HOME": str(tmp_path)}
        for name, script in (("my-cancel", CANCEL), ("my-status", STATUS)):
            (tmp_path / name).write_text(script)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{service['PATH']}"
        yield Project(api, tmp_path, service | own | {"EVALSTOP_LABELS": "gpus=8", "PATH": path})


def test_every_page_that_connects_something_is_followed() -> None:
    """The pages are those of the site's menu."""
    menu = re.findall(r"^  - (.+):$|^      - (?:.+: )?(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    heading, connecting = "", set()
    for title, page in menu:
        heading = title or heading
        if page and heading.startswith("Connect"):
            connecting.add(f"docs/{page}")
    assert connecting == {*PAGES} - {"README", "docs/quickstart"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_followed(page: str) -> None:
    """A code block is a step of its page, or a test takes it, or it is told why none does; and of each there is one."""
    followed = [(one.words, one.test) for one in FOLLOWED.values() if one.page == page]
    known = [words for words, _ in followed] + [words for of, words in NOT_RUN if of == page]
    assert [len(find_blocks(page, words)) for words in known] == [1] * len(known), known
    blocks = [block for block in blocks_of(ROOT / f"{page}.md") if block.kind and not block.is_step]
    assert [str(block) for block in blocks if not any(words in block.text for words in known)] == []
    for name, one in FOLLOWED.items():
        assert f'"{name}"' in (ROOT / one.test).read_text(), name


def test_pods_of_kubernetes_hand_their_names_to_mlflow() -> None:
    """What stands behind the variables of docs/kubernetes.md becomes labels by which the workload is found."""
    (variable,) = yaml.safe_load(read_block("mlflow pod labels"))
    labels = json.loads(variable["value"])
    given = {one["name"] for name in ("pods of jobs", "other pods") for one in yaml.safe_load(read_block(name))["env"]}
    assert {value.strip("$()") for value in labels.values()} <= given
    assert set(labels) == {"kubernetes_namespace", "kubernetes_kind", "kubernetes_name"}


def test_a_pod_reads_that_it_is_asked_to_save(tmp_path: Path) -> None:
    """From the file that the downward API writes."""
    found: dict[str, Any] = {}
    exec(read_block("asked to save"), found)
    file = tmp_path / "annotations"
    assert not found["is_asked_to_save"](file)
    file.write_text('kubernetes.io/config.seen="x"\nevalstop.io/save-checkpoint="2026-11-23T10:00:00Z"\n')
    assert found["is_asked_to_save"](file)


@pytest.mark.real
def test_readme_ends_with_a_stop(project: Project) -> None:
    """Its loop, in a project as a new one is, once it has been told what the README says."""
    project.shell("evalstop project set default_policy=default default_mode=shadow max_mode=shadow")
    (command,) = re.findall(r"`(evalstop project set [^`]+)`", (ROOT / "README.md").read_text())
    project.shell(command)
    (block,) = (block for block in blocks_of(ROOT / "README.md") if block.is_step)
    project.python(trainer_snippets.EVALUATE + block.text)
    project.check_stopped("ppo-7b-seed3", "obeyed")


@pytest.mark.real
def test_other_ways_in_end_with_a_stop(project: Project) -> None:
    """What curl opened is judged as any other run: by plain HTTP, and by scrapes that go on."""
    project.shell(write_script(ROOT / "docs/ways-in.md"))
    body = {"name": "curl-1", "metrics": "auto", "total_steps": 10_000, "labels": {"gpus": "8"}}
    again = project.api.post("/runs", json=body).raise_for_status().json()
    assert again["name"] == "curl-1-2"

    def post(step: int, value: float) -> dict[str, Any]:
        body = {"observations": [{"metric": "eval_accuracy", "step": step, "value": value}]}
        return dict(project.api.post(f"/runs/{again['id']}/observations", json=body).raise_for_status().json())

    def post_scrape(step: int, value: float) -> dict[str, Any]:
        text = f"eval_accuracy {value}\ntrainer_global_step {step}\n"
        query = {"step_metric": "trainer_global_step"}
        path = f"/runs/{scraped['id']}/openmetrics"
        return dict(project.api.post(path, params=query, content=text).raise_for_status().json())

    scraped = project.run("scraped")
    project.report(again, post)
    project.check_stopped("curl-1-2", "obeyed")
    project.report(scraped, post_scrape)
    project.check_stopped("scraped", "obeyed")


@pytest.mark.real
def test_streams_end_with_a_stop(project: Project) -> None:
    """One of the two runs of the page's stream falls."""
    project.shell(write_script(ROOT / "docs/http.md"))
    falls = project.run("seed-1")

    def post(step: int, value: float) -> dict[str, Any]:
        line = {"run_id": falls["id"], "metric": "eval", "step": step, "value": value}
        lines = {"Content-Type": "application/x-ndjson"}
        answer = project.api.post("/observations", content=json.dumps(line), headers=lines).raise_for_status()
        return dict(answer.json()["runs"][0])

    project.report(falls, post)
    project.check_stopped("seed-1", "obeyed")


@pytest.mark.real
@pytest.mark.parametrize("name", ["declared", "several evals"])
def test_declared_roles_end_with_a_stop(name: str, project: Project) -> None:
    """One eval, or several that fall together; and patterns for those who declare none."""
    project.shell(write_script(ROOT / "docs/roles.md"))
    (project.folder / "declare.py").write_text(read_block(name) + trainer_snippets.DECLARING)
    project.shell("python declare.py declared")
    project.check_stopped("declared", "obeyed")


@pytest.mark.real
def test_a_policy_that_parks_has_a_receiver(project: Project) -> None:
    """The page's policy is stored and listed, its endpoint asks for what a receiver that parks needs."""
    project.shell(read_block("endpoint that parks").replace("login-node", "127.0.0.1"))
    assert "run.park_requested" in project.shell("evalstop endpoint ls")
    project.api.post("/policies", json=json.loads(read_block("parks"))).raise_for_status()
    assert "aside@1" in project.shell("evalstop policy ls")


@pytest.mark.real
def test_the_client_in_its_tab_ends_with_a_stop(project: Project) -> None:
    """A loop of one's own asks, and ends."""
    evaluate = trainer_snippets.EVALUATE.replace(", 0.01, step / 1000", "")
    project.python(evaluate + read_block("client tab"))
    project.check_stopped("client-1", "obeyed")


@pytest.mark.real
def test_the_callback_in_its_tab_ends_with_a_stop(project: Project) -> None:
    """One line in a trainer that declares nothing."""
    trainer = trainer_snippets.TRAINER_OF_TRANSFORMERS.replace("eval_gsm8k", "eval_accuracy")
    project.python(read_block("callbacks tab") + "(callback,) = callbacks\n" + trainer)
    project.check_stopped("callback-1", "obeyed")


@pytest.mark.real
def test_mlflow_in_its_tab_ends_with_a_stop(project: Project) -> None:
    """A script that logs to MLflow and follows its tags."""
    script = read_block("mlflow should_stop") + trainer_snippets.LOGGING_TO_MLFLOW + trainer_snippets.FOLLOWING_MLFLOW
    (project.folder / "train.py").write_text(script)
    project.shell(read_block("mlflow tab"))
    project.check_stopped("logged", "obeyed")


@pytest.mark.real
def test_callbacks_end_with_a_stop(project: Project) -> None:
    """transformers' by the policy that the page names, and many processes, here one, by a person's word."""
    parts = (
        read_block("transformers"),
        trainer_snippets.TRAINER_OF_TRANSFORMERS,
        trainer_snippets.LOSS_THAT_SOMEBODY_STOPS,
        read_block("many processes"),
    )
    project.python("\n".join(parts), EVALSTOP_RUN_NAME="tuned")
    project.check_stopped("tuned", "obeyed")
    assert project.run("sft-7b")["decision"]["state"] == "obeyed"


@pytest.mark.real
def test_mlflow_ends_with_a_stop(project: Project) -> None:
    """A client that asks for its tags obeys, with the labels that the page has a Slurm job set."""
    exported = read_block("mlflow address").replace("http://127.0.0.1:8787", project.environment["EVALSTOP_URL"])
    (project.folder / "logs.py").write_text(
        read_block("mlflow should_stop") + trainer_snippets.LOGGING_TO_MLFLOW + trainer_snippets.FOLLOWING_MLFLOW
    )
    script = exported + read_block("mlflow slurm labels") + "python logs.py"
    project.shell(script, SLURM_JOB_ID="7", SLURM_CLUSTER_NAME="c")
    assert project.run("logged")["labels"].items() >= {"slurm_job_id": "7", "slurm_cluster": "c"}.items()
    project.check_stopped("logged", "obeyed")


@pytest.mark.real
def test_a_client_of_mlflow_that_never_asks_is_ended_from_outside(project: Project) -> None:
    """Not a line of it knows of EvalStop; the process receiver that started it proves that it is gone."""
    (project.folder / "logs.py").write_text(trainer_snippets.LOGGING_TO_MLFLOW + trainer_snippets.KILLED_WHILE_LOGGING)
    exported = read_block("mlflow address").replace("http://127.0.0.1:8787", project.environment["EVALSTOP_URL"])
    listen = _free()
    receiver = f"exec evalstop-receiver process --listen {listen} --job-key-env EVALSTOP_KEY -- python logs.py"
    with project.program(exported + receiver, EVALSTOP_WEBHOOK_SECRET=project.subscribe(f"http://{listen}/")) as ended:
        assert ended.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    project.check_stopped("logged", "confirmed")


@pytest.mark.real
def test_jobs_that_write_for_tensorboard_are_ended_from_outside(project: Project) -> None:
    """Watched from beside, and ended by the commands of any scheduler, which finds them by the labels of their runs."""
    for number, value in enumerate(FALLING):
        for folder in ("runs/a", "old-runs/b"):
            write(project.folder / folder / "events.out.tfevents.1", event(number, eval_accuracy=value))
        write(project.folder / "logs/validation/events.out.tfevents.1", event(number, epoch_loss=1 - value))
    beside, one_run, past = read_block("tensorboard").splitlines()
    listen = _free()
    receiver = f"exec {read_block('any scheduler').strip()} --listen {listen} --poll-seconds 0.1"
    with ExitStack() as stack:
        secret = project.subscribe(f"http://{listen}/")
        stack.enter_context(project.program(receiver, EVALSTOP_WEBHOOK_SECRET=secret))
        for watching, name in ((beside, "runs/a"), (one_run, "classifier")):
            job = stack.enter_context(running_program(JOB))
            labels = (
                "scheduler=mine,user=ann,gpus=8"  # one is said, as the page says it, and two are in the environment
            )
            command = f"exec {watching} --label job_id={job.pid} --total-steps 1000"
            stack.enter_context(project.program(command, EVALSTOP_LABELS=labels))
            assert job.wait(PATIENCE_SECONDS) == -signal.SIGTERM
            project.wait_for(name, "confirmed")
            project.check_stopped(name, "confirmed")
    project.shell(past)
    assert project.run("old-runs/b")["status"] == "completed"


@pytest.mark.real
@pytest.mark.parametrize("name", ["any scheduler", "30 lines", "bash"])
def test_receivers_of_the_page_end_a_job(name: str, project: Project) -> None:
    """The one that calls commands, and those that one writes: the job ends, and the decision is confirmed."""
    if name == "bash" and (missing := [one for one in ("jq", "openssl") if shutil.which(one) is None]):
        assert os.environ.get("CI") != "true", missing
        pytest.skip(f"missing: {missing}")
    listen = _free()
    variables = {"PORT": listen.partition(":")[2]}
    if name == "bash":
        endpoint = json.loads(project.shell("evalstop endpoint add pull:login-node --json"))
        variables |= {"ENDPOINT": endpoint["id"], "EVALSTOP_WEBHOOK_SECRET": endpoint["secret"]}
    else:
        variables["EVALSTOP_WEBHOOK_SECRET"] = project.subscribe(f"http://{listen}/")
    text = read_block(name)
    script = {
        "any scheduler": f"exec {text.strip()} --listen {listen} --poll-seconds 0.1",
        "30 lines": f"exec python -c {shlex.quote(text)}",
        "bash": text,
    }[name]
    with running_program(JOB) as job, project.program(script, **variables):
        labels: dict[str, str | int] = {"job_id": job.pid, "scheduler": "mine", "user": "ann", "gpus": 8}
        url, key = project.environment["EVALSTOP_URL"], project.environment["EVALSTOP_KEY"]
        with evalstop.Run("ended", url=url, key=key, labels=labels, total_steps=1000) as run:
            for step, value in enumerate(FALLING):
                run.log({"eval": value}, step=step)
            run.flush()
            assert job.wait(PATIENCE_SECONDS) == -signal.SIGTERM
            project.wait_for("ended", "confirmed")
    project.check_stopped("ended", "confirmed")


def _free() -> str:
    """An address on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"

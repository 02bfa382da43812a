"""`evalstop-receiver evaluator --kubernetes-job` as a program: a real service, a cluster with the Role of deploy/."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from evalstop_client.errors import ConfigurationError
from evalstop_client.eval_request import Summary
from evalstop_client.receivers.evaluator.evaluation import EvaluationFailed, PairedRequest, read_logged_scores
from evalstop_client.receivers.evaluator.kubernetes_job import JobEvaluation, load_job_manifest
from evalstop_client.receivers.kubernetes.kinds import JOB, POD, at

from tests.clients.programs import wait_until
from tests.clients.real_service import Project, find_eval_request
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, ROOT, KubernetesCluster, manifests
from tests.clients.receivers.kubernetes.conftest import EVALUATOR, EVALUATOR_TOKEN
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import Answered, Json
from tests.clients.receivers.receiver_program import RECEIVER
from tests.service.web.api.api_calls import create_eval_request, expect_json

REQUEST = PairedRequest("1", "run", "file:///30", "file:///now", 800, 7)
CURRENT = "file:///models/$(SECRET)/now"
SCRIPT = """\
import json, os, pathlib, sys, time
checkpoint, n, seed = sys.argv[1:]
folder = pathlib.Path(__file__).parent
with (folder / "log").open("a") as lines:
    lines.write(f"{checkpoint} {n} {seed} {'EVALSTOP_KEY' in os.environ}\\n")
while (folder / "hold").exists():
    time.sleep(0.02)
if (folder / "fail").exists():
    raise SystemExit("out of memory")
print("loading 100 %", file=sys.stderr, flush=True)
for prompt in range(int(n)):
    print(json.dumps({"score": prompt % 7 - 2.0 * ("now" in checkpoint) + 0.1 * (prompt % 3)}))
print("done in 3 s")
"""


@dataclass
class EvaluatorProgram:
    """A request that waits, a cluster, and evaluators that are started and killed as one likes."""

    folder: Path
    world: KubernetesCluster
    api: httpx.Client
    project: Project
    stack: ExitStack

    def __post_init__(self) -> None:
        self.run_id, self.request_id = create_eval_request(self.api)
        expect_json(self.api.post(f"/runs/{self.run_id}/checkpoints", json={"step": 59, "uri": CURRENT}), 201)
        set_up(self.world, self.folder)

    def start(self) -> subprocess.Popen[bytes]:
        command = [*RECEIVER, "evaluator", "--prompts", "50", "--prefix", "file:///", "--poll-seconds", "0.1"]
        command += ["--kubernetes-job", str(self.folder / "job.yaml"), "--api-server", self.world.server.url]
        command += ["--token-file", str(self.folder / "token")]
        environment = os.environ | {
            "EVALSTOP_URL": self.project.url,
            "EVALSTOP_KEY": self.project.key,
        }
        errors = self.stack.enter_context((self.folder / "errors").open("ab"))
        process = subprocess.Popen(command, env=environment, stderr=errors)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def asked(self) -> Json:
        return find_eval_request(self.api, self.run_id, self.request_id)

    def jobs(self) -> list[Json]:
        return self.world.admin.list(JOB, NAMESPACE)

    def evaluated(self) -> list[str]:
        log = self.folder / "log"
        return sorted(log.read_text().splitlines()) if log.exists() else []

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def hold(self, file: str = "hold") -> Path:
        (self.folder / file).touch()
        return self.folder / file


@pytest.fixture
def evaluator(
    kubernetes: KubernetesCluster, api: httpx.Client, eval_project: Project, tmp_path: Path
) -> Iterator[EvaluatorProgram]:
    with ExitStack() as stack:
        yield EvaluatorProgram(tmp_path, kubernetes, api, eval_project, stack)


def set_up(world: KubernetesCluster, folder: Path) -> None:
    """The Role of deploy/, a program that evaluates, and the manifest of a Job that runs it."""
    for one in manifests("kubernetes/evaluator.yaml"):
        if one["kind"] in ("Role", "RoleBinding"):
            world.admin.apply(one)
    (folder / "eval.py").write_text(SCRIPT)
    (folder / "token").write_text(EVALUATOR_TOKEN)
    job = example()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = [sys.executable, str(folder / "eval.py")]
    container["args"] = ["{checkpoint}", "{n}", "{seed}"]
    container["env"] = [{"name": "SECRET", "value": "secret"}]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def example() -> Json:
    """The manifest that the docs begin with."""
    job: Json = yaml.safe_load((ROOT / "examples/kubernetes_eval_job.yaml").read_text())
    return job


def test_a_request_is_answered_by_two_jobs(evaluator: EvaluatorProgram, cluster: FakeCluster) -> None:
    """Of what both print the scores alone count; no pod gets the key, and no more is granted than is used."""
    process = evaluator.start()
    wait_until(lambda: evaluator.asked()["answered_at"] is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    asked = evaluator.asked()
    assert (asked["difference"], asked["prompts"]) == (pytest.approx(-2.0), 200)
    assert evaluator.evaluated() == [f"{uri} 200 {asked['seed']} False" for uri in ("file:///30", CURRENT)]
    best, current = evaluator.jobs()
    assert [job["metadata"]["name"] for job in (best, current)] == [
        f"evalstop-{evaluator.request_id}-best",
        f"evalstop-{evaluator.request_id}-current",
    ]
    assert current["metadata"]["labels"] == {"evalstop.io/run": evaluator.run_id}
    assert current["metadata"]["annotations"] == {"evalstop.io/checkpoint": CURRENT}
    used = {
        (path.rpartition("/")[2] == "log", verb, "/jobs" in path)
        for verb, path, user in cluster.requests
        if user == EVALUATOR
    }
    (role,) = [one for one in manifests("kubernetes/evaluator.yaml") if one["kind"] == "Role"]
    granted = {
        ("log" in resource, verb, resource == "jobs")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted


def test_an_evaluator_that_is_killed_finds_its_jobs_again(evaluator: EvaluatorProgram) -> None:
    """Killed once the Jobs run; they end without it, and the next one answers by them and evaluates nothing anew."""
    gate = evaluator.hold()
    first = evaluator.start()
    wait_until(lambda: len(evaluator.evaluated()) == 2)
    first.kill()
    first.wait()
    gate.unlink()
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in evaluator.jobs()))
    assert evaluator.asked()["answered_at"] is None
    evaluator.start()
    wait_until(lambda: evaluator.asked()["answered_at"] is not None)
    assert evaluator.asked()["difference"] == pytest.approx(-2.0)
    assert len(evaluator.evaluated()) == 2


def test_an_evaluator_that_is_killed_between_two_jobs_creates_the_other(
    evaluator: EvaluatorProgram, cluster: FakeCluster
) -> None:
    """It has created one of both; the next one creates the other, and each checkpoint is evaluated once."""

    def refuse_the_second(request: Request) -> None:
        if request.method == "POST" and json.loads(request.raw)["metadata"]["name"].endswith("-current"):
            raise Answered(503, "ServiceUnavailable", "come back later")

    cluster.faults.append(refuse_the_second)
    first = evaluator.start()
    wait_until(lambda: "come back later" in evaluator.errors() and len(evaluator.evaluated()) == 1)
    first.kill()
    first.wait()
    cluster.faults.clear()
    evaluator.start()
    wait_until(lambda: evaluator.asked()["answered_at"] is not None)
    assert len(evaluator.evaluated()) == 2


def test_two_evaluators_share_the_jobs(evaluator: EvaluatorProgram) -> None:
    """They create each Job once; both may answer, and the first answer stands."""
    gate = evaluator.hold()
    both = [evaluator.start(), evaluator.start()]
    wait_until(lambda: len(evaluator.evaluated()) == 2)
    gate.unlink()
    wait_until(lambda: evaluator.asked()["answered_at"] is not None)
    assert [process.poll() for process in both] == [None, None]
    assert (len(evaluator.jobs()), len(evaluator.evaluated())) == (2, 2)


def test_jobs_that_fail_answer_nothing(evaluator: EvaluatorProgram) -> None:
    """The request stays as it was, the Job's own words are logged once, and a restart does not create it again."""
    evaluator.hold("fail")
    first = evaluator.start()
    wait_until(lambda: "failed" in evaluator.errors())
    wait_until(lambda: all("Failed" in JOB.list_states(job) for job in evaluator.jobs()))
    seen = [job["metadata"]["uid"] for job in evaluator.jobs()]
    first.kill()
    first.wait()
    assert f"Job {NAMESPACE}/evalstop-{evaluator.request_id}-" in evaluator.errors()
    assert evaluator.errors().count("failed: BackoffLimitExceeded") == 1
    evaluator.start()
    wait_until(lambda: evaluator.errors().count("failed: BackoffLimitExceeded") == 2)
    assert [job["metadata"]["uid"] for job in evaluator.jobs()] == seen
    assert len(evaluator.evaluated()) == 2
    asked = evaluator.asked()
    assert (asked["answered_at"], asked["probability_after"]) == (None, None)


def test_a_cluster_that_refuses_is_waited_for(evaluator: EvaluatorProgram, cluster: FakeCluster) -> None:
    """A permission or a quota that is missing can be given; it is logged once."""
    refusals: list[str] = []

    def refuse(request: Request) -> None:
        if request.user == EVALUATOR and request.method == "POST":
            refusals.append(request.path)
            raise Answered(403, "Forbidden", "exceeded quota: jobs")

    cluster.faults.append(refuse)
    evaluator.start()
    wait_until(lambda: len(refusals) > 3)
    assert evaluator.errors().count("exceeded quota: jobs") == 1
    cluster.faults.clear()
    wait_until(lambda: evaluator.asked()["answered_at"] is not None)


@pytest.fixture
def evaluation(kubernetes: KubernetesCluster, tmp_path: Path) -> JobEvaluation:
    """What an evaluator has evaluations done by."""
    set_up(kubernetes, tmp_path)
    manifest, namespace = load_job_manifest(tmp_path / "job.yaml", 1800.0)
    assert namespace == NAMESPACE
    return JobEvaluation(kubernetes.api(EVALUATOR_TOKEN), namespace, manifest, ["file:///"])


def test_a_pod_that_is_evicted_fails_the_evaluation(
    kubernetes: KubernetesCluster, evaluation: JobEvaluation, tmp_path: Path
) -> None:
    """What it had printed by then is no answer."""
    (tmp_path / "hold").touch()
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: kubernetes.runs("evalstop-1-current"))
    (pod,) = kubernetes.pods("evalstop-1-current")
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    kubernetes.admin.status(POD, pod, status)
    wait_until(lambda: any("Failed" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    with pytest.raises(EvaluationFailed, match="evalstop-1-current failed: BackoffLimitExceeded"):
        evaluation.compare(REQUEST)


def test_of_several_tries_the_one_that_succeeded_counts(
    kubernetes: KubernetesCluster, evaluation: JobEvaluation
) -> None:
    """Pods of the same Job that failed are not read."""
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    (best, _) = kubernetes.admin.list(JOB, NAMESPACE)
    container = {"name": "eval", "image": "none", "command": ["false"]}
    metadata = {"name": "a-first-try", "labels": {"controller-uid": best["metadata"]["uid"]}}
    kubernetes.admin.create(POD, NAMESPACE, {"metadata": metadata, "spec": {"containers": [container]}})
    wait_until(lambda: at(kubernetes.pods("a-first")[0], "status", "phase") == "Failed")
    found = evaluation.compare(REQUEST)
    assert found is not None
    assert found.difference == pytest.approx(-2.0)
    assert found.prompts == 800


def test_a_log_that_is_gone_fails_the_evaluation(kubernetes: KubernetesCluster, evaluation: JobEvaluation) -> None:
    """Both Jobs are complete, and their pods were deleted before they were read."""
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    for pod in kubernetes.admin.list(POD, NAMESPACE):
        kubernetes.admin.delete(POD, pod, gracePeriodSeconds=0)
    with pytest.raises(EvaluationFailed, match="is complete, and its pod is gone with its log"):
        evaluation.compare(REQUEST)


@pytest.mark.parametrize(
    "asked",
    [replace(REQUEST, id="../../x"), replace(REQUEST, best_uri="s3://a"), replace(REQUEST, current_uri="--help")],
)
def test_what_may_not_be_loaded_makes_no_job(
    kubernetes: KubernetesCluster, evaluation: JobEvaluation, asked: PairedRequest
) -> None:
    """Neither for the other checkpoint of the request."""
    with pytest.raises(EvaluationFailed):
        evaluation.compare(asked)
    assert kubernetes.admin.list(JOB, NAMESPACE) == []


def filled(folder: Path, job: Any) -> Json:
    """The Job that a manifest gives."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    manifest, _ = load_job_manifest(folder / "job.yaml", 1800.0)
    return manifest.fill("one", REQUEST, "s3://$(KEY)/{n}")


def test_a_manifest_is_filled_in(tmp_path: Path) -> None:
    """In command, args and env; a checkpoint's name names no variable and no other place; what is said is kept."""
    variables = [{"name": "SEED", "value": "{seed}"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "{n}"}}}]
    container = {"name": "eval", "image": "{checkpoint}", "command": ["eval", "{n}"], "env": variables}
    early = {"name": "fetch", "image": "fetch", "args": ["--at={checkpoint}"]}
    pod = {"containers": [container], "initContainers": [early]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"backoffLimit": 0, "template": {"spec": pod}}}
    made = filled(tmp_path, job | {"metadata": {"generateName": "eval-", "namespace": "a", "labels": {"team": "b"}}})
    assert made["metadata"]["name"] == "one"
    assert made["metadata"]["labels"] == {"team": "b", "evalstop.io/run": "run"}
    assert not made["metadata"].keys() & {"generateName", "namespace"}
    template = made["spec"].pop("template")["spec"]
    assert made["spec"] == {"backoffLimit": 0, "activeDeadlineSeconds": 1800, "ttlSecondsAfterFinished": 86_400}
    assert template["restartPolicy"] == "Never"
    assert template["initContainers"][0]["args"] == ["--at=s3://$$(KEY)/{n}"]
    assert template["containers"][0]["command"] == ["eval", "800"]
    assert template["containers"][0]["image"] == "{checkpoint}"
    assert template["containers"][0]["env"] == [{"name": "SEED", "value": "7"}, variables[1]]


def changed(**changes: Any) -> Json:
    job = example()
    for path, value in changes.items():
        *parents, last = path.split("__")
        at(job, *parents)[last] = value
    return job


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (changed(kind="Pod"), "not a batch/v1 Job"),
        (changed(spec__parallelism=2), "must be 1"),
        (
            changed(spec__template__spec={"containers": [{"name": "a", "args": ["{checkpoint}", "{n}"]}]}),
            "{seed} is missing",
        ),
        (
            changed(
                spec__template__spec={"containers": [{"name": "a", "args": ["-c", "eval {checkpoint} {n} {seed}"]}]}
            ),
            "could run commands",
        ),
        (changed(spec=None), "not a usable Job"),
        ([], "not a usable Job"),
    ],
)
def test_manifests_that_cannot_work_are_refused(tmp_path: Path, job: Any, words: str) -> None:
    """When the evaluator starts, with the place that is wrong."""
    with pytest.raises(ConfigurationError, match=words):
        filled(tmp_path, job)


def test_scores_are_found_in_a_log() -> None:
    """Objects with a score or a mean; numbers and other objects may be of anybody, and none at all is a failure."""
    log = b'100\n{"step": 3}\n{"score": 1}\n[W] {"score": 9}\n {"score": 2.5}\n{"score": \n'
    assert read_logged_scores(log) == [1.0, 2.5]
    assert read_logged_scores(b'warming up\n{"mean": 0.5, "stderr": 0.1}\n') == Summary(0.5, 0.1)
    for log in (b"", b"0.5\n", b'{"score": "good"}\n'):
        with pytest.raises(EvaluationFailed):
            read_logged_scores(log)

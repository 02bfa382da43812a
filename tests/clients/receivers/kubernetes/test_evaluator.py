"""`evalstop-receiver evaluator --kubernetes-job` as a program, with a real service and the Role of deploy/."""

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
from evalstop_client.receivers.evaluation import EvaluationFailed, PairedRequest, read_logged_scores
from evalstop_client.receivers.kubernetes.evaluation import JobEvaluation, load_job_manifest
from evalstop_client.receivers.kubernetes.kinds import JOB, POD, at

from tests.clients.programs import wait_until
from tests.clients.real_service import Project, find_eval_request
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, ROOT, KubernetesCluster, load_manifest
from tests.clients.receivers.kubernetes.conftest import EVALUATOR, EVALUATOR_TOKEN
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import Json, StatusError
from tests.clients.receivers.receiver_program import RECEIVER
from tests.service.web.api.api_calls import create_eval_request, expect_json

pytestmark = pytest.mark.real

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
    """A pending request to evaluate, a cluster, and evaluators that a test starts and kills."""

    folder: Path
    kubernetes: KubernetesCluster
    api: httpx.Client
    project: Project
    stack: ExitStack

    def __post_init__(self) -> None:
        self.run_id, self.request_id = create_eval_request(self.api)
        expect_json(self.api.post(f"/runs/{self.run_id}/checkpoints", json={"step": 59, "uri": CURRENT}), 201)
        install_evaluator(self.kubernetes, self.folder)

    def start(self) -> subprocess.Popen[bytes]:
        command = [*RECEIVER, "evaluator", "--prompts", "50", "--prefix", "file:///", "--poll-seconds", "0.1"]
        command += ["--kubernetes-job", str(self.folder / "job.yaml"), "--api-server", self.kubernetes.server.url]
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

    def read_request(self) -> Json:
        return find_eval_request(self.api, self.run_id, self.request_id)

    def list_jobs(self) -> list[Json]:
        return self.kubernetes.admin.list(JOB, NAMESPACE)

    def list_evaluations(self) -> list[str]:
        log = self.folder / "log"
        return sorted(log.read_text().splitlines()) if log.exists() else []

    def read_log(self) -> str:
        return (self.folder / "errors").read_text()

    def create_file(self, file: str) -> Path:
        (self.folder / file).touch()
        return self.folder / file


@pytest.fixture
def evaluator(
    kubernetes: KubernetesCluster, api: httpx.Client, eval_project: Project, tmp_path: Path
) -> Iterator[EvaluatorProgram]:
    with ExitStack() as stack:
        yield EvaluatorProgram(tmp_path, kubernetes, api, eval_project, stack)


def install_evaluator(kubernetes: KubernetesCluster, folder: Path) -> None:
    """Apply the Role of deploy/, and write a program that evaluates and the manifest of a Job that runs it."""
    for item in load_manifest("kubernetes/evaluator.yaml"):
        if item["kind"] in ("Role", "RoleBinding"):
            kubernetes.admin.apply(item)
    (folder / "eval.py").write_text(SCRIPT)
    (folder / "token").write_text(EVALUATOR_TOKEN)
    job = load_example()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = [sys.executable, str(folder / "eval.py")]
    container["args"] = ["{checkpoint}", "{n}", "{seed}"]
    container["env"] = [{"name": "SECRET", "value": "secret"}]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def load_example() -> Json:
    """The manifest of examples/."""
    job: Json = yaml.safe_load((ROOT / "examples/kubernetes_eval_job.yaml").read_text())
    return job


def test_request_is_answered_by_two_jobs(evaluator: EvaluatorProgram, cluster: FakeCluster) -> None:
    """Scores are read from both Jobs' logs, no pod gets the key, and the Role grants no more than is used."""
    process = evaluator.start()
    wait_until(lambda: evaluator.read_request()["answered_at"] is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    request = evaluator.read_request()
    assert (request["difference"], request["prompts"]) == (pytest.approx(-2.0), 200)
    assert evaluator.list_evaluations() == [f"{uri} 200 {request['seed']} False" for uri in ("file:///30", CURRENT)]
    best, current = evaluator.list_jobs()
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
    (role,) = [item for item in load_manifest("kubernetes/evaluator.yaml") if item["kind"] == "Role"]
    granted = {
        ("log" in resource, verb, resource == "jobs")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted


@pytest.mark.nightly
def test_restarted_evaluator_uses_the_finished_jobs(evaluator: EvaluatorProgram) -> None:
    """Jobs that end while no evaluator runs are read by the next one, which evaluates nothing again."""
    hold_file = evaluator.create_file("hold")
    first = evaluator.start()
    wait_until(lambda: len(evaluator.list_evaluations()) == 2)
    first.kill()
    first.wait()
    hold_file.unlink()
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in evaluator.list_jobs()))
    assert evaluator.read_request()["answered_at"] is None
    evaluator.start()
    wait_until(lambda: evaluator.read_request()["answered_at"] is not None)
    assert evaluator.read_request()["difference"] == pytest.approx(-2.0)
    assert len(evaluator.list_evaluations()) == 2


@pytest.mark.nightly
def test_restarted_evaluator_creates_the_missing_job(evaluator: EvaluatorProgram, cluster: FakeCluster) -> None:
    """After a crash between the two Jobs the next evaluator creates the second; each checkpoint is evaluated once."""

    def refuse_the_second(request: Request) -> None:
        if request.method == "POST" and json.loads(request.raw)["metadata"]["name"].endswith("-current"):
            raise StatusError(503, "ServiceUnavailable", "come back later")

    cluster.faults.append(refuse_the_second)
    first = evaluator.start()
    wait_until(lambda: "come back later" in evaluator.read_log() and len(evaluator.list_evaluations()) == 1)
    first.kill()
    first.wait()
    cluster.faults.clear()
    evaluator.start()
    wait_until(lambda: evaluator.read_request()["answered_at"] is not None)
    assert len(evaluator.list_evaluations()) == 2


def test_two_evaluators_share_the_jobs(evaluator: EvaluatorProgram) -> None:
    """Two evaluators create each Job once."""
    hold_file = evaluator.create_file("hold")
    both = [evaluator.start(), evaluator.start()]
    wait_until(lambda: len(evaluator.list_evaluations()) == 2)
    hold_file.unlink()
    wait_until(lambda: evaluator.read_request()["answered_at"] is not None)
    assert [process.poll() for process in both] == [None, None]
    assert (len(evaluator.list_jobs()), len(evaluator.list_evaluations())) == (2, 2)


@pytest.mark.nightly
def test_failed_jobs_leave_the_request_open(evaluator: EvaluatorProgram) -> None:
    """Failed Jobs are logged once and not created again, and the request stays unanswered."""
    evaluator.create_file("fail")
    first = evaluator.start()
    wait_until(lambda: "failed" in evaluator.read_log())
    wait_until(lambda: all("Failed" in JOB.list_states(job) for job in evaluator.list_jobs()))
    uids = [job["metadata"]["uid"] for job in evaluator.list_jobs()]
    first.kill()
    first.wait()
    assert f"Job {NAMESPACE}/evalstop-{evaluator.request_id}-" in evaluator.read_log()
    assert evaluator.read_log().count("failed: BackoffLimitExceeded") == 1
    evaluator.start()
    wait_until(lambda: evaluator.read_log().count("failed: BackoffLimitExceeded") == 2)
    assert [job["metadata"]["uid"] for job in evaluator.list_jobs()] == uids
    assert len(evaluator.list_evaluations()) == 2
    request = evaluator.read_request()
    assert (request["answered_at"], request["probability_after"]) == (None, None)


def test_refused_jobs_are_retried(evaluator: EvaluatorProgram, cluster: FakeCluster) -> None:
    """A refused Job is retried, since a permission or quota can be granted; the refusal is logged once."""
    refusals: list[str] = []

    def refuse(request: Request) -> None:
        if request.user == EVALUATOR and request.method == "POST":
            refusals.append(request.path)
            raise StatusError(403, "Forbidden", "exceeded quota: jobs")

    cluster.faults.append(refuse)
    evaluator.start()
    wait_until(lambda: len(refusals) > 3)
    assert evaluator.read_log().count("exceeded quota: jobs") == 1
    cluster.faults.clear()
    wait_until(lambda: evaluator.read_request()["answered_at"] is not None)


@pytest.fixture
def evaluation(kubernetes: KubernetesCluster, tmp_path: Path) -> JobEvaluation:
    """Evaluations by Jobs in the cluster."""
    install_evaluator(kubernetes, tmp_path)
    manifest, namespace = load_job_manifest(tmp_path / "job.yaml", 1800.0)
    assert namespace == NAMESPACE
    return JobEvaluation(kubernetes.connect(EVALUATOR_TOKEN), namespace, manifest, ["file:///"])


@pytest.mark.nightly
def test_evicted_pod_fails_the_evaluation(
    kubernetes: KubernetesCluster, evaluation: JobEvaluation, tmp_path: Path
) -> None:
    """What an evicted pod printed is not an answer."""
    (tmp_path / "hold").touch()
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: kubernetes.is_running("evalstop-1-current"))
    (pod,) = kubernetes.list_pods("evalstop-1-current")
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    kubernetes.admin.set_status(POD, pod, status)
    wait_until(lambda: any("Failed" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    with pytest.raises(EvaluationFailed, match="evalstop-1-current failed: BackoffLimitExceeded"):
        evaluation.compare(REQUEST)


@pytest.mark.nightly
def test_failed_pods_of_a_job_are_not_read(kubernetes: KubernetesCluster, evaluation: JobEvaluation) -> None:
    """Only the pod that succeeded is read."""
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    (best, _) = kubernetes.admin.list(JOB, NAMESPACE)
    container = {"name": "eval", "image": "none", "command": ["false"]}
    metadata = {"name": "a-first-try", "labels": {"controller-uid": best["metadata"]["uid"]}}
    kubernetes.admin.create(POD, NAMESPACE, {"metadata": metadata, "spec": {"containers": [container]}})
    wait_until(lambda: at(kubernetes.list_pods("a-first")[0], "status", "phase") == "Failed")
    comparison = evaluation.compare(REQUEST)
    assert comparison is not None
    assert comparison.difference == pytest.approx(-2.0)
    assert comparison.prompts == 800


@pytest.mark.nightly
def test_deleted_pod_fails_the_evaluation(kubernetes: KubernetesCluster, evaluation: JobEvaluation) -> None:
    """If a completed Job's pod is deleted before it is read, the evaluation fails."""
    assert evaluation.compare(REQUEST) is None
    wait_until(lambda: all("Complete" in JOB.list_states(job) for job in kubernetes.admin.list(JOB, NAMESPACE)))
    for pod in kubernetes.admin.list(POD, NAMESPACE):
        kubernetes.admin.delete(POD, pod, gracePeriodSeconds=0)
    with pytest.raises(EvaluationFailed, match="is complete, and its pod is gone with its log"):
        evaluation.compare(REQUEST)


@pytest.mark.parametrize(
    "paired_request",
    [replace(REQUEST, id="../../x"), replace(REQUEST, best_uri="s3://a"), replace(REQUEST, current_uri="--help")],
)
def test_invalid_request_creates_no_job(
    kubernetes: KubernetesCluster, evaluation: JobEvaluation, paired_request: PairedRequest
) -> None:
    """A request with an invalid id or checkpoint creates no Job, not even for its other checkpoint."""
    with pytest.raises(EvaluationFailed):
        evaluation.compare(paired_request)
    assert kubernetes.admin.list(JOB, NAMESPACE) == []


def fill_manifest(folder: Path, job: Any) -> Json:
    """The Job that a manifest gives."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    manifest, _ = load_job_manifest(folder / "job.yaml", 1800.0)
    return manifest.fill("one", REQUEST, "s3://$(KEY)/{n}")


def test_manifest_is_filled_in(tmp_path: Path) -> None:
    """Placeholders in command, args and env are filled; a checkpoint's name is escaped, and other fields are kept."""
    variables = [{"name": "SEED", "value": "{seed}"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "{n}"}}}]
    container = {"name": "eval", "image": "{checkpoint}", "command": ["eval", "{n}"], "env": variables}
    init_container = {"name": "fetch", "image": "fetch", "args": ["--at={checkpoint}"]}
    pod = {"containers": [container], "initContainers": [init_container]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"backoffLimit": 0, "template": {"spec": pod}}}
    filled = fill_manifest(
        tmp_path, job | {"metadata": {"generateName": "eval-", "namespace": "a", "labels": {"team": "b"}}}
    )
    assert filled["metadata"]["name"] == "one"
    assert filled["metadata"]["labels"] == {"team": "b", "evalstop.io/run": "run"}
    assert not filled["metadata"].keys() & {"generateName", "namespace"}
    template = filled["spec"].pop("template")["spec"]
    assert filled["spec"] == {"backoffLimit": 0, "activeDeadlineSeconds": 1800, "ttlSecondsAfterFinished": 86_400}
    assert template["restartPolicy"] == "Never"
    assert template["initContainers"][0]["args"] == ["--at=s3://$$(KEY)/{n}"]
    assert template["containers"][0]["command"] == ["eval", "800"]
    assert template["containers"][0]["image"] == "{checkpoint}"
    assert template["containers"][0]["env"] == [{"name": "SEED", "value": "7"}, variables[1]]


def change_example(**changes: Any) -> Json:
    """The example's manifest with some fields changed, by their paths."""
    job = load_example()
    for path, value in changes.items():
        *parents, last = path.split("__")
        at(job, *parents)[last] = value
    return job


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (change_example(kind="Pod"), "not a batch/v1 Job"),
        (change_example(spec__parallelism=2), "must be 1"),
        (
            change_example(spec__template__spec={"containers": [{"name": "a", "args": ["{checkpoint}", "{n}"]}]}),
            "{seed} is missing",
        ),
        (
            change_example(
                spec__template__spec={"containers": [{"name": "a", "args": ["-c", "eval {checkpoint} {n} {seed}"]}]}
            ),
            "could run commands",
        ),
        (change_example(spec=None), "not a usable Job"),
        ([], "not a usable Job"),
    ],
)
def test_unusable_manifest_is_an_error(tmp_path: Path, job: Any, message: str) -> None:
    """A manifest that cannot work is a ConfigurationError that names the field."""
    with pytest.raises(ConfigurationError, match=message):
        fill_manifest(tmp_path, job)


def test_scores_are_read_from_a_log() -> None:
    """Objects with a score or a mean are scores; other lines are ignored, and a log without scores is an error."""
    log = b'100\n{"step": 3}\n{"score": 1}\n[W] {"score": 9}\n {"score": 2.5}\n{"score": \n'
    assert read_logged_scores(log) == [1.0, 2.5]
    assert read_logged_scores(b'warming up\n{"mean": 0.5, "stderr": 0.1}\n') == Summary(0.5, 0.1)
    for log in (b"", b"0.5\n", b'{"score": "good"}\n'):
        with pytest.raises(EvaluationFailed):
            read_logged_scores(log)

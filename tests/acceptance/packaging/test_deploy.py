"""deploy/: manifests and chart are what Kubernetes' schemas and Helm take, and grant no more than is used."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from evalstop_client.receivers.cli import entry as receiver_cli
from evalstop_client.receivers.evaluator.evaluation import PairedRequest
from evalstop_client.receivers.evaluator.kubernetes_job import load_job_manifest
from evalstop_client.receivers.kubernetes.kinds import COMMAND, EVENT, JOB, KINDS, POD, POD_LOG, WORKLOAD
from evalstop_client.scheduler_labels import KUBERNETES_LABELS
from evalstop_service import cli
from evalstop_service.settings import Settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart/evalstop"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = ("1.25.0", "1.37.0")
FIELDS = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}
EVERY_KIND = dict.fromkeys(("kueue", "jobset", "trainer", "kubeflow", "ray", "volcano"), True)
RECEIVERS = ("receiver", "evaluator")
RECEIVER = {"enabled": True, "namespaces": ["research", "eval"], "kinds": EVERY_KIND, "checkpointAnnotation": True}
EVAL_JOB = yaml.safe_load((ROOT / "examples/kubernetes_eval_job.yaml").read_text())
EVALUATOR = {"enabled": True, "prefixes": ["s3://runs/", "file:///runs/"], "job": EVAL_JOB}
PLACEMENT: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "tools"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "tools", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sqlite": {"service": {"storageClass": "fast"}, "receiver": RECEIVER},
    "evaluator": {"evaluator": {**EVALUATOR, "timeoutSeconds": 7200}},
    "evaluator elsewhere": {"service": {"enabled": False}, "evaluator": {**EVALUATOR, "url": "https://e.org"}},
    "postgresql": {
        "service": {
            "database": "postgresql",
            "settings": {"EVALSTOP_LOG_FORMAT": "json", "EVALSTOP_PORT": "8787"},
            "ingress": {"enabled": True, "host": "evalstop.example.org", "tls": "evalstop-tls"},
            "ingressFrom": [{"namespaceSelector": {"matchLabels": {"team": "research"}}}],
        },
        "receiver": {**RECEIVER, "cluster": "lab-1"},
    },
    "pull": {"service": {"enabled": False}, "receiver": {**RECEIVER, "url": "https://e.org", "pullEndpoint": "e1"}},
    "placed": {
        "service": {"database": "postgresql", **PLACEMENT},
        "receiver": {**RECEIVER, **PLACEMENT},
        "evaluator": {**EVALUATOR, **PLACEMENT},
    },
    "delete": {"receiver": {**RECEIVER, "stopBy": "delete", "checkpointAnnotation": False}},
}

Json = dict[str, Any]


def rendered(values: Json, name: str = "stop", namespace: str = "tools") -> list[Json]:
    """What Helm makes of the chart."""
    files = helm().Chart.load(CHART).render(values, name=name, namespace=namespace)
    text = [one for name, one in sorted(files.items()) if name.endswith(".yaml")]
    return [item for one in text for item in yaml.safe_load_all(one) if item]


def helm() -> Any:
    """Helm's own library; there is one for most machines."""
    if os.environ.get("CI") == "true":
        import helm_python
    else:
        helm_python = pytest.importorskip("helm_python")
    return helm_python


def validated(items: list[Json]) -> None:
    """Every field is one that Kubernetes knows, of the right type, in an old release and a new one."""
    for item in items:
        for version in KUBERNETES:
            kubernetes_validate.validate(copy.deepcopy(item), version, strict=True)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: str(file.name))
def test_manifests_are_what_kubernetes_takes(file: Path) -> None:
    """A field that was mistyped would be dropped without a word."""
    validated([item for item in yaml.safe_load_all(file.read_text()) if item])


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_chart_renders_to_what_kubernetes_takes(values: Json) -> None:
    """For each way to install it; Helm's linter has nothing to say but that there is no icon."""
    report = helm().lint(CHART, values, strict=True)
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]
    validated(rendered(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"receiver": {"enabled": True}}, "receiver.namespaces"),
        ({"service": {"enabled": False}, "receiver": {**RECEIVER, "url": ""}}, "receiver.url"),
        ({"service": {"databse": "sqlite"}}, "databse"),
        ({"service": {"settings": {"LOG_FORMAT": "json"}}}, "LOG_FORMAT"),
        ({"receiver": {**RECEIVER, "stopBy": "kill"}}, "stopBy"),
        ({"evaluator": {**EVALUATOR, "job": {"spec": {}}}}, "evaluator.job.metadata.namespace"),
        ({"evaluator": {**EVALUATOR, "prefixes": []}}, "evaluator.prefixes"),
        ({"service": {"enabled": False}, "evaluator": EVALUATOR}, "evaluator.url"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Json, words: str) -> None:
    """Before anything is installed, and by name."""
    with pytest.raises(helm().HelmError, match=words):
        rendered(values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_commands_and_settings_are_ours(values: Json, capsys: pytest.CaptureFixture[str]) -> None:
    """Each container's arguments are taken by the command line of its image, each variable is a setting."""
    items = rendered(values) + [item for file in MANIFESTS for item in yaml.safe_load_all(file.read_text()) if item]
    for container in containers(items):
        if container["name"] in RECEIVERS:
            with pytest.raises(SystemExit) as end:
                receiver_cli.main([*container["args"], "--help"])
            assert end.value.code == 0
            explained = capsys.readouterr().out
            assert all(one.partition("=")[0] in explained for one in container["args"])
        else:
            cli.parser(container["args"]).parse_args(container["args"])
            assert {one["name"] for one in container.get("env", [])} <= FIELDS


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_containers_may_do_little(values: Json) -> None:
    """No root, nothing written but to volumes, no capabilities, and the API for receiver and evaluator alone."""
    items = rendered(values) + [item for file in MANIFESTS for item in yaml.safe_load_all(file.read_text()) if item]
    for container in containers(items):
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
    for pod in pods(items):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is any(one["name"] in RECEIVERS for one in pod["containers"])


def test_pods_run_where_the_values_say() -> None:
    """Every pod of the chart takes the node selector, tolerations, affinity and image pull secrets of its values."""
    placed = pods(rendered(VALUES["placed"]))
    assert len(placed) == 5
    for spec in placed:
        assert {name: spec.get(name) for name in PLACEMENT} == PLACEMENT
    assert not any(name in spec for spec in pods(rendered(VALUES["defaults"])) for name in PLACEMENT)


def test_roles_grant_what_the_receiver_does_and_no_more() -> None:
    """The plain manifest and the chart grant the same, on the kinds of the table, and never a wildcard or a secret."""
    roles = list(yaml.safe_load_all((DEPLOY / "kubernetes/receiver-role.yaml").read_text()))
    plain = granted([one for one in roles if one["kind"] == "Role"])
    chart = [one for one in rendered(VALUES["sqlite"]) if one["kind"] == "Role"]
    assert {one["metadata"]["namespace"] for one in chart} == {"research", "eval"}
    assert granted(chart) == plain
    known = {(kind.group, kind.resource) for kind in (*KINDS, POD, WORKLOAD, COMMAND, EVENT)}
    assert {(group, resource) for group, resource, _ in plain} == known
    assert {verb for _, _, verb in plain} == {"get", "list", "watch", "patch", "create", "delete"}
    assert {resource for _, resource, verb in plain if verb == "delete"} == {"pods"}
    fewer = granted([one for one in rendered({"receiver": {**RECEIVER, "kinds": {}}}) if one["kind"] == "Role"])
    assert {(group, resource) for group, resource, _ in fewer} == {("batch", "jobs"), ("", "pods"), ("", "events")}


def test_the_evaluator_may_create_jobs_and_read_them() -> None:
    """The chart grants the same as the manifest, all of which tests/clients/receivers/kubernetes shows to be used."""
    plain = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes/evaluator.yaml").read_text()) if one]
    (role,) = [one for one in rendered(VALUES["evaluator"]) if one["kind"] == "Role"]
    assert role["metadata"]["namespace"] == "research"
    assert granted([one for one in plain if one["kind"] == "Role"]) == granted([role])
    assert granted([role]) == {
        (JOB.group, JOB.resource, "get"),
        (JOB.group, JOB.resource, "create"),
        (POD.group, POD.resource, "list"),
        (POD_LOG.group, POD_LOG.resource, "get"),
    }


def test_the_chart_hands_the_job_to_the_evaluator(tmp_path: Path) -> None:
    """As it was given, and a changed one starts the evaluator anew."""
    items = rendered(VALUES["evaluator"])
    (config,) = [one for one in items if one["kind"] == "ConfigMap"]
    (tmp_path / "job.yaml").write_text(config["data"]["job.yaml"])
    assert yaml.safe_load(config["data"]["job.yaml"]) == EVAL_JOB
    assert load_job_manifest(tmp_path / "job.yaml", 60.0)[1] == "research"
    other = rendered({"evaluator": {**EVALUATOR, "job": {**EVAL_JOB, "spec": {**EVAL_JOB["spec"], "backoffLimit": 0}}}})
    marks = [
        one["spec"]["template"]["metadata"]["annotations"]["evalstop.io/job-sha256"]
        for one in (*items, *other)
        if one["kind"] == "Deployment"
    ]
    assert len(set(marks)) == 2


def test_schema_is_made_before_the_new_processes_start() -> None:
    """On PostgreSQL a hook migrates; on SQLite `up` does it by itself, alone on its volume."""
    items = {(item["kind"], item["metadata"]["name"]): item for item in rendered(VALUES["postgresql"])}
    assert items["Job", "stop-migrate"]["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert ("Deployment", "stop-deliver") in items
    items = {(item["kind"], item["metadata"]["name"]): item for item in rendered({})}
    assert items["StatefulSet", "stop-serve"]["spec"]["replicas"] == 1
    assert not any(kind == "Job" for kind, _ in items)


def test_image_of_the_receiver_is_built_from_what_is_there() -> None:
    """Its Dockerfile copies the client alone and starts its command."""
    text = (DEPLOY / "receiver.Dockerfile").read_text()
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert all((ROOT / one).exists() for one in copied)
    assert 'ENTRYPOINT ["evalstop-receiver"]' in text


def containers(items: list[Json]) -> list[Json]:
    return [container for pod in pods(items) for container in pod["containers"]]


def pods(items: list[Json]) -> list[Json]:
    return [item["spec"]["template"]["spec"] for item in items if "template" in item.get("spec", {})]


def granted(roles: list[Json]) -> set[tuple[str, str, str]]:
    rules = [rule for role in roles for rule in role["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_example_of_a_job_is_one() -> None:
    """It is what Kubernetes takes, and tells the client all by which the receiver finds it, but for the cluster."""
    (job,) = yaml.safe_load_all((ROOT / "examples/kubernetes_job.yaml").read_text())
    validated([job])
    (container,) = containers([job])
    told = {one["name"] for one in container["env"]}
    assert set(KUBERNETES_LABELS.values()) - told == {KUBERNETES_LABELS["kubernetes_cluster"]}


def test_the_example_of_an_evaluation_is_a_job() -> None:
    """As an evaluator fills it in; the fields are Kubernetes' own."""
    manifest, namespace = load_job_manifest(ROOT / "examples/kubernetes_eval_job.yaml", 60.0)
    request = PairedRequest("1", "run", "s3://runs/1", "s3://runs/2", 800, 7)
    job = manifest.fill("evalstop-1-best", request, "s3://runs/1")
    assert namespace == "research"
    assert containers([job])[0]["command"] == ["python", "eval.py", "s3://runs/1", "800", "7"]
    validated([job])

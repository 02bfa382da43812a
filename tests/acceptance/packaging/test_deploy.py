"""The Kubernetes manifests and the Helm chart are valid and grant no more than is used."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from evalstop_client.job_identity import KUBERNETES_LABELS
from evalstop_client.receivers import cli as receiver_cli
from evalstop_client.receivers.kubernetes.kinds import KINDS, POD, WORKLOAD
from evalstop_service import cli
from evalstop_service.settings import Settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart/evalstop"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = ("1.25.0", "1.37.0")
SETTING_VARIABLES = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}
ALL_KINDS = dict.fromkeys(("kueue", "jobset", "trainer", "kubeflow", "ray"), True)
RECEIVER = {"enabled": True, "namespaces": ["research", "eval"], "kinds": ALL_KINDS}
PLACEMENT: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "tools"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "tools", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sqlite": {"service": {"storageClass": "fast"}, "receiver": RECEIVER},
    "postgresql": {
        "service": {
            "database": "postgresql",
            "settings": {"EVALSTOP_LOG_FORMAT": "json", "EVALSTOP_PORT": "8787"},
            "ingress": {"enabled": True, "host": "evalstop.example.org", "tls": "evalstop-tls"},
            "ingressFrom": [{"namespaceSelector": {"matchLabels": {"team": "research"}}}],
        },
        "receiver": {**RECEIVER, "cluster": "lab-1", "returnIdle": 2},
    },
    "pull": {"service": {"enabled": False}, "receiver": {**RECEIVER, "url": "https://e.org", "pullEndpoint": "e1"}},
    "placed": {
        "service": {"database": "postgresql", "artifactClaim": "artifacts", **PLACEMENT},
        "receiver": {**RECEIVER, **PLACEMENT},
    },
}

Json = dict[str, Any]


def render_chart(values: Json, name: str = "stop", namespace: str = "tools") -> list[Json]:
    """The objects that Helm renders from the chart."""
    files = load_helm().Chart.load(CHART).render(values, name=name, namespace=namespace)
    documents = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [item for text in documents for item in yaml.safe_load_all(text) if item]


def load_manifests(*files: Path) -> list[Json]:
    """The objects of YAML files."""
    return [item for file in files for item in yaml.safe_load_all(file.read_text()) if item]


def load_helm() -> Any:
    """Helm's library; skips on machines for which there is none, and fails in CI."""
    if os.environ.get("CI") == "true":
        import helm_python
    else:
        helm_python = pytest.importorskip("helm_python")
    return helm_python


def assert_valid(items: list[Json]) -> None:
    """Check objects against the schemas of an old and a new Kubernetes release, without unknown fields."""
    for item in items:
        for version in KUBERNETES:
            kubernetes_validate.validate(copy.deepcopy(item), version, strict=True)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: str(file.name))
def test_manifests_are_valid(file: Path) -> None:
    """Kubernetes would drop a misspelled field without an error."""
    assert_valid(load_manifests(file))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_chart_renders_valid_objects(values: Json) -> None:
    """For each set of values the objects are valid, and Helm's linter only asks for an icon."""
    report = load_helm().lint(CHART, values, strict=True)
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]
    assert_valid(render_chart(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"receiver": {"enabled": True}}, "receiver.namespaces"),
        ({"service": {"enabled": False}, "receiver": {**RECEIVER, "url": ""}}, "receiver.url"),
        ({"service": {"databse": "sqlite"}}, "databse"),
        ({"service": {"settings": {"LOG_FORMAT": "json"}}}, "LOG_FORMAT"),
    ],
)
def test_invalid_values_are_refused(values: Json, words: str) -> None:
    """Rendering fails with the name of the missing or unknown value."""
    with pytest.raises(load_helm().HelmError, match=words):
        render_chart(values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_container_commands_and_variables_exist(values: Json, capsys: pytest.CaptureFixture[str]) -> None:
    """Each container's arguments parse, and each variable is a setting."""
    items = render_chart(values) + load_manifests(*MANIFESTS)
    for container in list_containers(items):
        if container["name"] == "receiver":
            with pytest.raises(SystemExit) as end:
                receiver_cli.main([*container["args"], "--help"])
            assert end.value.code == 0
            help_text = capsys.readouterr().out
            assert all(argument.partition("=")[0] in help_text for argument in container["args"])
        else:
            cli.parser(container["args"]).parse_args(container["args"])
            assert {variable["name"] for variable in container.get("env", [])} <= SETTING_VARIABLES


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_containers_are_restricted(values: Json) -> None:
    """No root, a read-only file system, no capabilities; only the receiver may use the Kubernetes API."""
    items = render_chart(values) + load_manifests(*MANIFESTS)
    for container in list_containers(items):
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
    for pod in list_pod_specs(items):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is any(
            container["name"] == "receiver" for container in pod["containers"]
        )


def test_pods_have_the_placement_of_the_values() -> None:
    """Each pod gets the node selector, tolerations, affinity and image pull secrets of its values."""
    placed_pods = list_pod_specs(render_chart(VALUES["placed"]))
    assert len(placed_pods) == 4
    for spec in placed_pods:
        assert {name: spec.get(name) for name in PLACEMENT} == PLACEMENT
    assert not any(name in spec for spec in list_pod_specs(render_chart(VALUES["defaults"])) for name in PLACEMENT)


def test_replicas_share_the_claim_of_artifacts() -> None:
    """On PostgreSQL the data folder of all replicas is the claim of the values, without one a folder of each pod."""
    for values, volume in (
        ({"artifactClaim": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
        ({}, {"emptyDir": {}}),
    ):
        items = render_chart({"service": {"database": "postgresql", **values}})
        (serve,) = (item for item in items if (item["kind"], item["metadata"]["name"]) == ("Deployment", "stop-serve"))
        assert {"name": "data", **volume} in serve["spec"]["template"]["spec"]["volumes"]


def test_receiver_role_grants_only_what_is_used() -> None:
    """Manifest and chart grant the same verbs on the same kinds, without wildcards or secrets."""
    roles = load_manifests(DEPLOY / "kubernetes/receiver-role.yaml")
    manifest_permissions = list_permissions([role for role in roles if role["kind"] == "Role"])
    chart_roles = [item for item in render_chart(VALUES["sqlite"]) if item["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in chart_roles} == {"research", "eval"}
    assert list_permissions(chart_roles) == manifest_permissions
    used = {(kind.group, kind.resource) for kind in (*KINDS, POD, WORKLOAD)}
    assert {(group, resource) for group, resource, _ in manifest_permissions} == used
    assert {verb for _, _, verb in manifest_permissions} == {"get", "list", "patch", "delete"}
    assert {resource for _, resource, verb in manifest_permissions if verb == "delete"} == {"pods"}
    without_kinds = render_chart({"receiver": {**RECEIVER, "kinds": {}}})
    fewer = list_permissions([item for item in without_kinds if item["kind"] == "Role"])
    assert {(group, resource) for group, resource, _ in fewer} == {("batch", "jobs"), ("", "pods")}


def test_schema_is_migrated_before_the_upgrade() -> None:
    """On PostgreSQL a Helm hook migrates; on SQLite the single `up` process does."""
    items = {(item["kind"], item["metadata"]["name"]): item for item in render_chart(VALUES["postgresql"])}
    assert items["Job", "stop-migrate"]["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert ("Deployment", "stop-deliver") in items
    items = {(item["kind"], item["metadata"]["name"]): item for item in render_chart({})}
    assert items["StatefulSet", "stop-serve"]["spec"]["replicas"] == 1
    assert not any(kind == "Job" for kind, _ in items)


def test_receiver_image_copies_existing_paths() -> None:
    """The receiver's Dockerfile copies existing paths and starts its command."""
    text = (DEPLOY / "receiver.Dockerfile").read_text()
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert all((ROOT / path).exists() for path in copied)
    assert 'ENTRYPOINT ["evalstop-receiver"]' in text


def list_containers(items: list[Json]) -> list[Json]:
    return [container for pod in list_pod_specs(items) for container in pod["containers"]]


def list_pod_specs(items: list[Json]) -> list[Json]:
    return [item["spec"]["template"]["spec"] for item in items if "template" in item.get("spec", {})]


def list_permissions(roles: list[Json]) -> set[tuple[str, str, str]]:
    rules = [rule for role in roles for rule in role["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_example_job_is_valid() -> None:
    """The example job is valid and sets every variable by which the receiver finds a job, except the cluster."""
    (job,) = yaml.safe_load_all((ROOT / "examples/kubernetes_job.yaml").read_text())
    assert_valid([job])
    (container,) = list_containers([job])
    variables = {variable["name"] for variable in container["env"]}
    assert set(KUBERNETES_LABELS.values()) - variables == {KUBERNETES_LABELS["kubernetes_cluster"]}

"""What the receiver's Role lacks, found when the receiver starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_client.receivers.cli import USAGE, main
from evalstop_client.receivers.kubernetes.api import check_permissions

from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.test_api_server_faults import make_fault

LACKS = f"in namespace {NAMESPACE} this receiver's Role lacks "


@pytest.mark.parametrize(
    ("verb", "resources", "rule"),
    [
        ("list", "pods", '{apiGroups: [""], resources: [pods], verbs: [list]}.'),
        ("patch", "", '{apiGroups: ["batch"], resources: [jobs], verbs: [get, patch]}, or the same for another kind.'),
    ],
)
def test_receiver_that_could_stop_nothing_does_not_start(
    kubernetes: KubernetesCluster,
    cluster: FakeCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    resources: str,
    rule: str,
) -> None:
    """Without a verb on pods, or on any kind of workload, it ends and names the rule to add."""
    cluster.revoke_verb(verb, resources)
    cluster.revoke_verb("get", "jobs" if not resources else "secrets")
    (tmp_path / "token").write_text(TOKEN)
    connection = ["--api-server", kubernetes.server.url, "--token-file", str(tmp_path / "token")]
    assert main(["kubernetes", *connection, "--allow-namespace", NAMESPACE]) == USAGE
    assert LACKS + rule in capsys.readouterr().err


def test_verbs_that_some_stops_need_are_logged(
    kubernetes: KubernetesCluster, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A kind that is granted in part is named in the log; a kind that the Role leaves out is not."""
    check_permissions(kubernetes.connect(), {NAMESPACE})
    assert caplog.messages == []
    for verb, resource in (("patch", "jobs"), ("get", "jobsets"), ("patch", "jobsets")):
        cluster.revoke_verb(verb, resource)
    check_permissions(kubernetes.connect(), {NAMESPACE})
    assert caplog.messages == [LACKS + '{apiGroups: ["batch"], resources: [jobs], verbs: [patch]}']


@pytest.mark.parametrize("answers", [True, False])
def test_receiver_starts_where_it_cannot_know(
    kubernetes: KubernetesCluster, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """It only warns while the API server does not answer, and for any namespace, where RoleBindings may grant it."""
    cluster.faults += [] if answers else [make_fault(503)]
    check_permissions(kubernetes.connect(), None if answers else {NAMESPACE})
    warning = "in all namespaces this receiver's Role lacks" if answers else "permissions are not checked: "
    assert caplog.messages[0].startswith(warning)

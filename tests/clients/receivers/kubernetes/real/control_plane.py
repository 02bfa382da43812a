"""A real Kubernetes control plane on free loopback ports: etcd, kube-apiserver and kube-controller-manager."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from tests.clients.receivers.kubernetes.cluster import RECEIVER, ApiServer
from tests.clients.receivers.kubernetes.fake_cluster import ADMIN
from tests.fixtures.free_ports import find_free_ports

T = TypeVar("T")
TOKEN = "receiver-token"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "evalstop/kubernetes-1.20"
STARTUP_SECONDS = 90.0
CONTROLLERS = ("job", "garbagecollector")
"""Those that the tests need; nodes and the controllers of other projects have substitutes."""


class KubernetesNotBuilt(Exception):
    """Kubernetes is not built on this machine: `make test-kubernetes` builds it."""


@contextmanager
def running_control_plane(folder: Path, programs: Path = CACHE / "bin") -> Iterator[ApiServer]:
    """A new control plane; its data is deleted with it."""
    etcd = shutil.which("etcd")
    if etcd is None or not (programs / "kube-apiserver").exists():
        raise KubernetesNotBuilt(KubernetesNotBuilt.__doc__)
    api_port, store_port, peer_port, controllers_port = find_free_ports(4)
    url, store, peer = (
        f"https://127.0.0.1:{api_port}",
        f"http://127.0.0.1:{store_port}",
        f"http://127.0.0.1:{peer_port}",
    )
    tokens = [(ADMIN, "admin", "1", '"system:masters"'), (TOKEN, RECEIVER, "2", "")]
    (folder / "tokens.csv").write_text("".join(f"{','.join(token)}\n" for token in tokens))
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    with ExitStack() as stack:
        stack.enter_context(
            _program(
                folder / "etcd.log",
                etcd,
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
            )
        )
        stack.enter_context(
            _program(
                folder / "api.log",
                str(programs / "kube-apiserver"),
                f"--etcd-servers={store}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={api_port}",
                f"--cert-dir={folder / 'certs'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/24",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--disable-admission-plugins=ServiceAccount",  # pods need no account here
            )
        )
        certificate = folder / "certs/apiserver.crt"
        tls = _wait(lambda: _trust(certificate), folder)
        _wait(lambda: _is_ready(url, tls), folder)
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(url, certificate)))
        stack.enter_context(
            _program(
                folder / "controllers.log",
                str(programs / "kube-controller-manager"),
                f"--kubeconfig={kubeconfig}",
                f"--controllers={','.join(CONTROLLERS)}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={controllers_port}",
            )
        )
        yield ApiServer(url, ADMIN, TOKEN, tls, certificate, is_real=True)


def _kubeconfig(url: str, certificate: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "real",
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "admin"}}],
        "clusters": [{"name": "real", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
        "users": [{"name": "admin", "user": {"token": ADMIN}}],
    }


@contextmanager
def _program(log: Path, *command: str) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], T | None], folder: Path) -> T:
    deadline = time.monotonic() + STARTUP_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in folder.glob("*.log"))
            raise AssertionError(f"it did not come up in {STARTUP_SECONDS:g} s\n{logs}")
        time.sleep(0.2)
    return value


def _trust(certificate: Path) -> ssl.SSLContext | None:
    """A context that trusts the server's self-signed certificate, once it is written."""
    try:
        return ssl.create_default_context(cafile=str(certificate))
    except OSError:
        return None


def _is_ready(url: str, tls: ssl.SSLContext) -> bool:
    headers = {"authorization": f"Bearer {ADMIN}"}
    try:
        return httpx.get(f"{url}/readyz", headers=headers, verify=tls, trust_env=False, timeout=60).is_success
    except (httpx.HTTPError, OSError):
        return False

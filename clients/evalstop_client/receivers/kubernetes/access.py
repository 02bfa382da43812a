"""Address and credentials of a Kubernetes API server: a pod's ServiceAccount, a kubeconfig, or options."""

from __future__ import annotations

import argparse
import base64
import json
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.stop.processes import read_token_from, run

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def no_token() -> str | None:
    """No token: a certificate or a proxy authenticates."""
    return None


@dataclass(frozen=True)
class Access:
    """`token` is called before every request, because tokens expire. `tls` is None if the url is plain http."""

    url: str
    namespace: str = "default"
    token: Callable[[], str | None] = field(default=no_token, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def load_in_cluster_access(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """The access that Kubernetes gives to a pod; None outside a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        return None
    namespace = (folder / "namespace").read_text().strip()
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(url, namespace, read_token_from(folder / "token"), create_tls_context(folder / "ca.crt"))


def create_access(url: str, token_file: Path | None, ca_file: Path | None) -> Access:
    """A server at an explicit URL, such as `kubectl proxy`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"api-server {url!r}: write it like https://10.0.0.1:6443 or http://127.0.0.1:8001.")
    token = read_token_from(token_file) if token_file else no_token
    tls = create_tls_context(ca_file) if url.startswith("https://") else None
    return Access(url.rstrip("/"), token=token, tls=tls)


def create_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """A TLS context that trusts the certificates of a file, by default the system's."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise ConfigurationError(f"{ca_file}: {error}") from None


EXEC_SECONDS = 60.0
UNDATED_SECONDS = 300.0  # how long a token without an expiry is cached
SPARE_SECONDS = 60.0


def load_kubeconfig(file: Path, context: str | None, environment: Mapping[str, str]) -> Access:
    """The access from a context of a file, by default the current one; `environment` is that of exec plugins.

    Raises ConfigurationError if it is unusable.
    """
    try:
        config = read_yaml(file)
        chosen = _find_entry(config, "context", context or config.get("current-context"))
        cluster = _find_entry(config, "cluster", chosen["cluster"])
        user = _find_entry(config, "user", chosen["user"])
        url = str(cluster["server"]).rstrip("/")
        tls = _create_tls(cluster, user, file.parent) if url.startswith("https://") else None
        token = _choose_token(user, file.parent, environment)
        return Access(url, chosen.get("namespace") or "default", token, tls)
    except OSError as error:
        raise ConfigurationError(
            f"{file}: {error.strerror}; set --kubeconfig, or --api-server, or run it in a pod."
        ) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{file}: it is not a usable kubeconfig: {error!r}") from None


def read_yaml(file: Path) -> Any:
    """The content of a YAML file; raises ConfigurationError if it is not YAML."""
    try:
        import yaml  # an optional dependency, not needed inside a cluster
    except ImportError:
        raise ConfigurationError(f"{file}: to read it, pip install 'evalstop-client[kubernetes]'.") from None
    try:
        return yaml.safe_load(file.read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{file}: {error}") from None


def find_kubeconfig(environment: Mapping[str, str]) -> Path:
    """The file that kubectl would use; of several files in KUBECONFIG the first. Raises ConfigurationError."""
    path = environment.get("KUBECONFIG", "").split(os.pathsep)[0]
    try:
        return Path(path) if path else Path("~/.kube/config").expanduser()
    except RuntimeError:  # a container's user need not have a home
        raise ConfigurationError("kubeconfig: this user has no home; name a file with --kubeconfig.") from None


def _find_entry(config: Any, kind: str, name: Any) -> Mapping[str, Any]:
    for entry in config.get(f"{kind}s") or []:
        if entry["name"] == name:
            content: Mapping[str, Any] = entry[kind] or {}
            return content
    raise ValueError(f"there is no {kind} {name!r}")


def _create_tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    authority = cluster.get("certificate-authority-data")
    file = cluster.get("certificate-authority") if not authority else None
    tls = ssl.create_default_context(
        cafile=str(folder / file) if file else None, cadata=_decode_base64(authority).decode() if authority else None
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    if "client-certificate-data" in user:  # OpenSSL reads certificates only from files
        with tempfile.TemporaryDirectory(prefix="evalstop-") as certificate_folder:
            files = [Path(certificate_folder) / name for name in ("client-certificate", "client-key")]
            for file in files:
                file.write_bytes(_decode_base64(user[f"{file.name}-data"]))
            tls.load_cert_chain(str(files[0]), str(files[1]))
    elif "client-certificate" in user:
        tls.load_cert_chain(folder / user["client-certificate"], folder / user["client-key"])
    return tls


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _choose_token(user: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Callable[[], str | None]:
    if isinstance(token := user.get("token"), str):
        return lambda: token
    if "tokenFile" in user:
        return read_token_from(folder / user["tokenFile"])
    if helper := user.get("exec"):
        command = [helper["command"], *(helper.get("args") or [])]
        exec_info = {"apiVersion": helper["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        variables = {variable["name"]: variable["value"] for variable in helper.get("env") or []}
        context = {**environment, **variables, "KUBERNETES_EXEC_INFO": json.dumps(exec_info)}
        return PluginToken(command, context)
    if unknown := set(user) & {"username", "auth-provider"}:
        raise ValueError(f"authentication with {', '.join(sorted(unknown))} is not supported")
    return no_token


class PluginToken:
    """A token printed by a program, cached until shortly before it expires: logging in takes seconds."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0

    def __call__(self) -> str:
        with self._lock:
            if time.time() >= self._until:
                self._token, self._until = self._log_in()
            return self._token

    def _log_in(self) -> tuple[str, float]:
        result = run(self._command, self._environment, EXEC_SECONDS)
        try:
            if result.exit_code == 0:
                status = json.loads(result.output)["status"]
                ends = status.get("expirationTimestamp")
                until = datetime.fromisoformat(ends).timestamp() if ends else time.time() + UNDATED_SECONDS
                return str(status["token"]), until - SPARE_SECONDS
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise SchedulerUnavailable(f"no token: {self._command[0]}: {result.last_line}")


def add_access_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of commands that use a cluster; inside one, none is needed."""
    add = parser.add_argument
    add(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="for use outside the cluster (default: $KUBECONFIG, ~/.kube/config)",
    )
    add("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    add("--api-server", metavar="URL", help="URL to use instead of a kubeconfig, such as http://127.0.0.1:8001")
    add("--token-file", type=Path, metavar="FILE", help="with --api-server: file with the token, read at every request")
    add("--ca-file", type=Path, metavar="FILE", help="with --api-server: certificates to trust (default: the system's)")


def load_access(options: argparse.Namespace, environment: Mapping[str, str]) -> Access:
    """The access from the options; `environment` is that of the kubeconfig's programs."""
    if options.api_server:
        if options.kubeconfig or options.context:
            raise ConfigurationError("api-server: it replaces a kubeconfig; set only one of them.")
        return create_access(options.api_server, options.token_file, options.ca_file)
    if options.token_file or options.ca_file:
        raise ConfigurationError("token-file and ca-file: they require --api-server.")
    inside = None if options.kubeconfig or options.context else load_in_cluster_access(os.environ)
    if inside is not None:
        return inside
    file = options.kubeconfig or find_kubeconfig(os.environ)
    return load_kubeconfig(file, options.context, environment)

"""Address and credentials of the API server: a pod's ServiceAccount, or as configured."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evalstop_client.errors import ConfigurationError, SchedulerUnavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def no_token() -> str | None:
    """What proves nothing: a certificate or a proxy does."""
    return None


@dataclass(frozen=True)
class Access:
    """`token` is asked before every request, for tokens end. `tls` is None where the url is plain http."""

    url: str
    namespace: str = "default"
    token: Callable[[], str | None] = field(default=no_token, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def load_in_cluster_access(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """The access that Kubernetes gives to a pod; None outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        return None
    namespace = (folder / "namespace").read_text().strip()
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(url, namespace, read_token_from(folder / "token"), create_tls_context(folder / "ca.crt"))


def direct(url: str, namespace: str, token_file: Path | None, ca_file: Path | None) -> Access:
    """A server that is named outright, such as `kubectl proxy`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"api-server {url!r}: write it like https://10.0.0.1:6443 or http://127.0.0.1:8001.")
    token = read_token_from(token_file) if token_file else no_token
    return Access(
        url.rstrip("/"), namespace, token, create_tls_context(ca_file) if url.startswith("https://") else None
    )


def read_token_from(file: Path) -> Callable[[], str | None]:
    """A token in a file, read at every request: Kubernetes replaces it within the hour."""

    def read() -> str:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerUnavailable(f"no token: {error}") from None

    return read


def create_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Trust in the certificates of a file, in the system's where there is none."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise ConfigurationError(f"{ca_file}: {error}") from None

"""Address and credentials of the API server: a pod's ServiceAccount, or from the configuration."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evalstop_client.errors import ConfigurationError, SchedulerUnavailable

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


def read_token_from(file: Path) -> Callable[[], str | None]:
    """Read a token from a file at every request: Kubernetes replaces it hourly."""

    def read() -> str:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerUnavailable(f"no token: {error}") from None

    return read


def create_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """A TLS context that trusts the certificates of a file, by default the system's."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise ConfigurationError(f"{ca_file}: {error}") from None

"""Certificates of the environment, which a receiver beside a scheduler that speaks plain HTTP does not need."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from evalstop_client.receivers.kubernetes.api import Access, Api
from evalstop_client.service import trusted_certificates
from evalstop_lab.replay.servers import Remote

CONNECT: dict[str, Callable[[str], object]] = {
    "kubernetes": lambda scheme: Api(Access(f"{scheme}://127.0.0.1:9")),
    "replay": lambda scheme: Remote(f"{scheme}://127.0.0.1:9", {}),
}


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_stale_certificate_file_does_not_stop_plain_http(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], object]
) -> None:
    """SSL_CERT_FILE of an earlier machine is not read for an address without TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/ca.pem")
    trusted_certificates.cache_clear()
    with pytest.raises(OSError, match="No such file"):
        httpx.Client()
    connect("http")

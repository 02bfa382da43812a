"""Authlib's client of one OpenID provider, which discovers the provider and checks what it says about itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx2
from authlib.integrations.base_client import BaseApp, OAuth2Mixin, OpenIDMixin
from authlib.integrations.httpx_client import OAuth2Client

from evalstop_service.security.openid import USERINFO

TIMEOUT_SECONDS = 10.0
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Accepted signature algorithms: with others, anyone with the client's secret, or anyone at all, could sign."""

_NEEDED = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class Client(OAuth2Mixin, OpenIDMixin, BaseApp):  # type: ignore[misc]
    """Authlib's client of one provider."""

    client_cls = OAuth2Client
    server_metadata: dict[str, Any]

    def __init__(self, issuer: str, client_id: str, client_secret: str | None, scopes: str) -> None:
        super().__init__(
            framework=None,
            name="provider",
            client_id=client_id,
            client_secret=client_secret,
            client_kwargs={
                "scope": scopes,
                "code_challenge_method": "S256",
                "timeout": TIMEOUT_SECONDS,
                "verify": httpx2.create_ssl_context(),  # otherwise loaded for each of four requests, 40 ms each
                **({} if client_secret else {"token_endpoint_auth_method": "none"}),
            },
        )
        self.issuer = issuer

    def load_server_metadata(self) -> dict[str, Any]:
        """The metadata of the provider, fetched at the first sign-in; its issuer must be the configured one."""
        # Without a lock: while the provider does not respond, each visitor would wait for all earlier ones.
        if not self.server_metadata:
            with self._get_session() as session:
                address = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
                answer = session.request("GET", address, withhold_token=True)
                answer.raise_for_status()
                self.server_metadata = _check_metadata(answer.json(), self.issuer)
        return self.server_metadata

    def fetch_jwk_set(self, force: bool = False) -> dict[str, Any]:
        """The provider's current keys: a revoked one must not be accepted any more."""
        keys: dict[str, Any] = super().fetch_jwk_set(force=True)
        return keys


def _check_metadata(metadata: dict[str, Any], issuer: str) -> dict[str, Any]:
    if metadata["issuer"] != issuer:
        raise ValueError(f"its issuer is {metadata['issuer']!r}")
    urls = {name: metadata[name] for name in (*_NEEDED, *({USERINFO} & metadata.keys()))}
    if any(urlsplit(url).scheme not in ("https", urlsplit(issuer).scheme) for url in urls.values()):
        raise ValueError("it has endpoints without TLS")
    methods = metadata.get("token_endpoint_auth_methods_supported")
    return {
        "issuer": issuer,
        "id_token_signing_alg_values_supported": list(ALGORITHMS),
        **({"token_endpoint_auth_methods_supported": methods} if methods else {}),
        **urls,
    }

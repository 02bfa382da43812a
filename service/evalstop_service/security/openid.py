"""Signs visitors in with an OpenID provider (authorization code flow with PKCE).

Authlib implements the protocol. This module adds checks: the discovered provider must be the configured one, its tokens
must be for this client and signed by one of its current keys, and any other response is refused.

Sources: OpenID Connect Core 1.0 (3.1), OpenID Connect Discovery 1.0 (4.3), RFC 7636 (PKCE), RFC 9207 (`iss`).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx2
from authlib.integrations.base_client import BaseApp, OAuth2Mixin, OpenIDMixin
from authlib.integrations.httpx_client import OAuth2Client

from evalstop_service.clock import Clock
from evalstop_service.errors import ServiceError

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
LEEWAY_SECONDS = 60
"""Tolerated difference between the clocks of the provider and the service."""

DISCOVERY_SECONDS = 3600.0
"""How long the provider's metadata is cached."""

DISCOVERY_RETRY_SECONDS = 60.0
"""Pause after a failed fetch, during which the previous metadata stays in use."""

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Accepted signature algorithms: with others, anyone with the client's secret, or anyone at all, could sign."""

MAX_SUBJECT_CHARACTERS = 255
"""By OpenID Connect Core 1.0 (2)."""

_NEEDED, _USERINFO = ("authorization_endpoint", "token_endpoint", "jwks_uri"), "userinfo_endpoint"

_SAYS_ISSUER = "authorization_response_iss_parameter_supported"


class ProviderUnavailable(ServiceError):
    """The OpenID provider does not answer correctly. Try again in a moment, or sign in with a key."""


class SignInRefused(ServiceError):
    """The OpenID provider's answer does not prove who you are. Start again from here."""


@dataclass(frozen=True)
class ProviderSettings:
    """The provider's issuer URL, this service's client id and secret there, and the scopes to ask for."""

    issuer: str
    client_id: str
    client_secret: str | None = field(repr=False)
    scopes: str


@dataclass(frozen=True)
class SignInState:
    """A sign-in in progress, stored by the browser that started it."""

    state: str
    nonce: str
    verifier: str


class OpenIdProvider:
    """One provider, discovered at the first sign-in and again every hour."""

    def __init__(self, terms: ProviderSettings, clock: Clock) -> None:
        self.issuer = terms.issuer
        self._app = _App(terms, clock)

    def begin_sign_in(self, redirect_uri: str) -> tuple[str, SignInState]:
        """The URL to send a visitor to, who returns to `redirect_uri`; raises ProviderUnavailable."""
        try:
            authorization = self._app.create_authorization_url(redirect_uri)
        except Exception as error:
            raise self._unavailable(error) from error
        state = SignInState(authorization["state"], authorization["nonce"], authorization["code_verifier"])
        return authorization["url"], state

    def finish_sign_in(
        self, sign_in: SignInState, redirect_uri: str, answer: Mapping[str, str], claim_names: Iterable[str]
    ) -> dict[str, Any]:
        """The claims of a visitor who returned; those in `claim_names` are fetched if the token lacks them.

        Raises SignInRefused unless this response belongs to the sign-in, ProviderUnavailable when the provider fails.
        """
        if not hmac.compare_digest(answer.get("state", "").encode(), sign_in.state.encode()):
            raise SignInRefused("This sign-in was not started in this browser. Start again from here.")
        if "iss" in answer and answer["iss"] != self.issuer:
            raise SignInRefused("The response came from another OpenID provider. Start again from here.")
        if "code" not in answer:
            raise SignInRefused(
                "The OpenID provider refused the sign-in. Start again from here, or sign in with a key."
            )
        try:
            if "iss" not in answer and self._app.load_server_metadata()[_SAYS_ISSUER]:
                raise SignInRefused
            return self._fetch_claims(sign_in, redirect_uri, answer["code"], claim_names)
        except httpx2.TransportError as error:
            raise self._unavailable(error) from error
        except SignInRefused:
            raise
        except Exception as error:  # the response may be anything, and must not sign anyone in
            if isinstance(error, httpx2.HTTPStatusError) and error.response.is_server_error:
                raise self._unavailable(error) from error
            _log.warning("the response of the OpenID provider %s was refused: %s", self.issuer, _describe(error))
            raise SignInRefused from error

    def _fetch_claims(
        self, sign_in: SignInState, redirect_uri: str, code: str, claim_names: Iterable[str]
    ) -> dict[str, Any]:
        token = self._app.fetch_access_token(redirect_uri, code=code, code_verifier=sign_in.verifier)
        claims = self._app.parse_id_token(
            token,
            nonce=sign_in.nonce,
            claims_options={"iss": {"value": self.issuer}, "aud": {"value": self._app.client_id}},
            leeway=LEEWAY_SECONDS,
        )
        if not claims or not _is_subject(claims["sub"]):
            raise SignInRefused
        missing = [name for name in claim_names if name not in claims]
        if missing and _USERINFO in self._app.load_server_metadata():
            userinfo = self._app.userinfo(token=token)
            if userinfo.get("sub") != claims["sub"]:
                raise SignInRefused
            # `email_verified` applies to the e-mail address from the same source only.
            verified = (claims if "email" in claims else userinfo).get("email_verified")
            return dict(userinfo) | dict(claims) | {"email_verified": verified}
        return dict(claims)

    def _unavailable(self, error: Exception) -> ProviderUnavailable:
        _log.warning("the OpenID provider %s does not answer correctly: %s", self.issuer, _describe(error))
        return ProviderUnavailable()


class _App(OAuth2Mixin, OpenIDMixin, BaseApp):  # type: ignore[misc]
    """Authlib's client of one provider."""

    client_cls = OAuth2Client
    server_metadata: dict[str, Any]
    _discover_at: datetime

    def __init__(self, terms: ProviderSettings, clock: Clock) -> None:
        super().__init__(
            framework=None,
            name="provider",
            client_id=terms.client_id,
            client_secret=terms.client_secret,
            client_kwargs={
                "scope": terms.scopes,
                "code_challenge_method": "S256",
                "timeout": TIMEOUT_SECONDS,
                "verify": httpx2.create_ssl_context(),  # otherwise loaded for each of four requests, 40 ms each
                **({} if terms.client_secret else {"token_endpoint_auth_method": "none"}),
            },
        )
        self._issuer = terms.issuer
        self._clock = clock

    def load_server_metadata(self) -> dict[str, Any]:
        """The provider's metadata, after a check that the issuer is the configured one.

        If it cannot be fetched again, the previous metadata stays in use.
        """
        # Without a lock: while the provider does not respond, each visitor would wait for all earlier ones.
        now = self._clock()
        if not self.server_metadata:
            self._discover(now)
        elif now >= self._discover_at:
            self._discover_at = now + timedelta(seconds=DISCOVERY_RETRY_SECONDS)
            try:
                self._discover(now)
            except Exception as error:
                _log.warning("the OpenID provider %s could not be discovered again: %s", self._issuer, _describe(error))
        return self.server_metadata

    def _discover(self, now: datetime) -> None:
        with self._get_session() as session:
            address = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
            answer = session.request("GET", address, withhold_token=True)
            answer.raise_for_status()
            metadata = _check_metadata(answer.json(), self._issuer)
        self._discover_at = now + timedelta(seconds=DISCOVERY_SECONDS)
        self.server_metadata = metadata  # last: a thread that sees it reads the time, too

    def fetch_jwk_set(self, force: bool = False) -> dict[str, Any]:
        """The provider's current keys: a revoked one must not be accepted any more."""
        keys: dict[str, Any] = super().fetch_jwk_set(force=True)
        return keys


def _check_metadata(metadata: dict[str, Any], issuer: str) -> dict[str, Any]:
    if metadata["issuer"] != issuer:
        raise ValueError(f"its issuer is {metadata['issuer']!r}")
    urls = {name: metadata[name] for name in (*_NEEDED, *({_USERINFO} & metadata.keys()))}
    if any(urlsplit(url).scheme not in ("https", urlsplit(issuer).scheme) for url in urls.values()):
        raise ValueError("it has endpoints without TLS")
    methods = metadata.get("token_endpoint_auth_methods_supported")
    return {
        "issuer": issuer,
        "id_token_signing_alg_values_supported": list(ALGORITHMS),
        _SAYS_ISSUER: metadata.get(_SAYS_ISSUER) is True,
        **({"token_endpoint_auth_methods_supported": methods} if methods else {}),
        **urls,
    }


def _is_subject(claim: Any) -> bool:
    return isinstance(claim, str) and 0 < len(claim) <= MAX_SUBJECT_CHARACTERS and claim.isprintable()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]

"""Signs visitors in with an OpenID provider (authorization code flow with PKCE).

Authlib implements the protocol. This module and `openid_client` add checks: the discovered provider must be the
configured one, its tokens must be for this client and signed by one of its current keys, and any other response is
refused.

Sources: OpenID Connect Core 1.0 (3.1), OpenID Connect Discovery 1.0 (4.3), RFC 7636 (PKCE), RFC 9207 (`iss`).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from evalstop_service.errors import ServiceError
from evalstop_service.security.scopes import Grants

_log = logging.getLogger(__name__)

LEEWAY_SECONDS = 60
"""Tolerated difference between the clocks of the provider and the service."""

MAX_SUBJECT_CHARACTERS = 255
"""By OpenID Connect Core 1.0 (2)."""

USERINFO = "userinfo_endpoint"
"""A key of the provider's metadata."""


class ProviderUnavailable(ServiceError):
    """The OpenID provider does not answer correctly. Try again in a moment, or sign in with a key."""


class SignInRefused(ServiceError):
    """The OpenID provider's answer does not prove who you are. Start again from here."""


@dataclass(frozen=True)
class SignInState:
    """A sign-in in progress, stored by the browser that started it."""

    state: str
    nonce: str
    verifier: str


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


class OpenIdProvider:
    """One provider, discovered at the first sign-in, and the grants that map its claims to roles.

    `client`: that of `openid_client`.
    """

    def __init__(self, client: Any, grants: Grants) -> None:
        self.issuer, self.grants, self._app = client.issuer, grants, client

    def begin_sign_in(self, redirect_uri: str) -> tuple[str, SignInState]:
        """The URL to send a visitor to, who returns to `redirect_uri`; raises ProviderUnavailable."""
        try:
            authorization = self._app.create_authorization_url(redirect_uri)
        except Exception as error:
            raise self._unavailable(error) from error
        state = SignInState(authorization["state"], authorization["nonce"], authorization["code_verifier"])
        return authorization["url"], state

    def finish_sign_in(self, sign_in: SignInState, redirect_uri: str, answer: Mapping[str, str]) -> dict[str, Any]:
        """The claims of a visitor who returned; those that the grants need are fetched if the token lacks them.

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
            return self._fetch_claims(sign_in, redirect_uri, answer["code"])
        except httpx2.TransportError as error:
            raise self._unavailable(error) from error
        except SignInRefused:
            raise
        except Exception as error:  # the response may be anything, and must not sign anyone in
            if isinstance(error, httpx2.HTTPStatusError) and error.response.is_server_error:
                raise self._unavailable(error) from error
            _log.warning("the response of the OpenID provider %s was refused: %s", self.issuer, _describe_error(error))
            raise SignInRefused from error

    def _fetch_claims(self, sign_in: SignInState, redirect_uri: str, code: str) -> dict[str, Any]:
        token = self._app.fetch_access_token(redirect_uri, code=code, code_verifier=sign_in.verifier)
        claims = self._app.parse_id_token(
            token,
            nonce=sign_in.nonce,
            claims_options={"iss": {"value": self.issuer}, "aud": {"value": self._app.client_id}},
            leeway=LEEWAY_SECONDS,
        )
        if not claims or not _is_subject(claims["sub"]):
            raise SignInRefused
        missing = [name for name in self.grants.claims if name not in claims]
        if missing and USERINFO in self._app.load_server_metadata():
            userinfo = self._app.userinfo(token=token)
            if userinfo.get("sub") != claims["sub"]:
                raise SignInRefused
            # `email_verified` applies to the e-mail address from the same source only.
            verified = (claims if "email" in claims else userinfo).get("email_verified")
            return dict(userinfo) | dict(claims) | {"email_verified": verified}
        return dict(claims)

    def _unavailable(self, error: Exception) -> ProviderUnavailable:
        _log.warning("the OpenID provider %s does not answer correctly: %s", self.issuer, _describe_error(error))
        return ProviderUnavailable()


def _is_subject(claim: Any) -> bool:
    return isinstance(claim, str) and 0 < len(claim) <= MAX_SUBJECT_CHARACTERS and claim.isprintable()

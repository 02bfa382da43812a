"""The checks of an OpenID provider's answers, with a fake provider that falsifies them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from evalstop_service.security.openid import (
    OpenIdProvider,
    ProviderUnavailable,
    SignInRefused,
    SignInState,
)
from evalstop_service.security.openid_client import (
    Client,
)
from evalstop_service.security.scopes import Grants
from joserfc.jwk import RSAKey

from tests.service.web.pages.fake_provider import CLIENT_ID, CLIENT_SECRET, FakeProvider, start_fake_provider


@pytest.fixture(scope="module")
def fake_provider() -> Iterator[FakeProvider]:
    with start_fake_provider() as provider:
        yield provider


CompleteSignIn = Callable[..., dict[str, Any]]


@pytest.fixture
def complete_sign_in(fake_provider: FakeProvider) -> CompleteSignIn:
    """Starts a sign-in at a provider with valid answers, and completes it with these callback parameters."""
    fake_provider.reset()

    def run_sign_in(**answer: str | None) -> dict[str, Any]:
        provider = OpenIdProvider(Client(fake_provider.address, CLIENT_ID, CLIENT_SECRET, "openid email"), Grants(()))
        url, state = provider.begin_sign_in("http://127.0.0.1/openid/callback")
        request = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert request["code_challenge_method"] == "S256"
        fake_provider.nonce = request["nonce"]
        callback = {"code": "c", "state": request["state"], **answer}
        present = {name: value for name, value in callback.items() if value is not None}
        return provider.finish_sign_in(state, "http://127.0.0.1/openid/callback", present)

    return run_sign_in


def test_valid_answer_gives_its_claims(complete_sign_in: CompleteSignIn, fake_provider: FakeProvider) -> None:
    """Claims come from the token, missing ones from the user info; the request proves PKCE."""
    claims = complete_sign_in()
    assert (claims["sub"], claims["email"]) == ("1", "dana@example.com")
    assert fake_provider.token_request["code_verifier"]
    assert complete_sign_in(iss=fake_provider.address)["sub"] == "1"


INVALID_ANSWERS: dict[str, Callable[[FakeProvider], object]] = {
    "an unknown key": lambda fake: setattr(fake, "signing_key", RSAKey.generate_key(2048)),
    "no signature": lambda fake: setattr(fake, "algorithm", "none"),
    "signed with the client's secret": lambda fake: setattr(fake, "algorithm", "HS256"),
    "another issuer": lambda fake: fake.claims.update(iss="https://evil.example"),
    "no issuer": lambda fake: fake.claims.update(iss=None),
    "another audience": lambda fake: fake.claims.update(aud="another-client"),
    "another audience, for this party": lambda fake: fake.claims.update(aud="another-client", azp=CLIENT_ID),
    "another audience too": lambda fake: fake.claims.update(aud=["evalstop", "other"], azp="other"),
    "another nonce": lambda fake: fake.claims.update(nonce="of another sign-in"),
    "no nonce": lambda fake: fake.claims.update(nonce=None),
    "expired": lambda fake: fake.claims.update(exp=1_700_000_000),
    "no expiry": lambda fake: fake.claims.update(exp=None),
    "no subject": lambda fake: fake.claims.update(sub=None),
    "a number as subject": lambda fake: fake.set_subject(1),
    "an empty subject": lambda fake: fake.set_subject(""),
    "a subject too long": lambda fake: fake.set_subject("x" * 256),
    "a subject that cannot be stored": lambda fake: fake.set_subject("a\x00"),
    "user info of another subject": lambda fake: fake.userinfo.update(sub="2"),
    "no ID token": lambda fake: fake.raw_bodies.update({"/token": b"{}"}),
    "a malformed token": lambda fake: fake.raw_bodies.update({"/token": b'{"access_token":"a","id_token":"a.b.c"}'}),
    "not JSON": lambda fake: fake.raw_bodies.update({"/token": b"<html>"}),
    "a JSON list": lambda fake: fake.raw_bodies.update({"/token": b"[1]"}),
    "unusable keys": lambda fake: fake.raw_bodies.update({"/jwks": b'{"keys": [{"kty": "oct"}]}'}),
}


@pytest.mark.parametrize("fault", INVALID_ANSWERS)
def test_invalid_answer_is_refused(complete_sign_in: CompleteSignIn, fake_provider: FakeProvider, fault: str) -> None:
    """A falsified token, key set or user info refuses the sign-in."""
    INVALID_ANSWERS[fault](fake_provider)
    with pytest.raises(SignInRefused):
        complete_sign_in()


def test_email_and_its_verification_have_one_source(
    complete_sign_in: CompleteSignIn, fake_provider: FakeProvider
) -> None:
    """An address of the token is not verified by the user info, nor the other way round."""
    fake_provider.userinfo["groups"] = ["g"]
    fake_provider.claims.update(email="kim@example.com")
    claims = complete_sign_in()
    assert (claims["email"], claims["email_verified"], claims["groups"]) == ("kim@example.com", None, ["g"])
    fake_provider.claims.update(email=None, email_verified=True)
    fake_provider.userinfo["email_verified"] = False
    claims = complete_sign_in()
    assert (claims["email"], claims["email_verified"]) == ("dana@example.com", False)


def test_current_keys_verify_each_sign_in(fake_provider: FakeProvider) -> None:
    """A key that the provider adds is accepted, and one that it removes is not."""
    fake_provider.reset()
    provider = OpenIdProvider(Client(fake_provider.address, CLIENT_ID, CLIENT_SECRET, "openid"), Grants(()))

    def sign_in() -> dict[str, Any]:
        url, state = provider.begin_sign_in("http://127.0.0.1/openid/callback")
        (fake_provider.nonce,) = parse_qs(urlsplit(url).query)["nonce"]
        return provider.finish_sign_in(state, "http://127.0.0.1/openid/callback", {"code": "c", "state": state.state})

    assert sign_in()["sub"] == "1"
    previous = fake_provider.key
    fake_provider.key = RSAKey.generate_key(2048, {"kid": "one"})  # a new key with the same id
    try:
        with pytest.raises(SignInRefused):
            sign_in()
        fake_provider.signing_key = fake_provider.key
        assert sign_in()["sub"] == "1"
    finally:
        fake_provider.key = previous


@pytest.mark.parametrize("path", ["/token", "/jwks", "/userinfo"])
def test_provider_failure_is_reported_as_unavailable(
    complete_sign_in: CompleteSignIn, fake_provider: FakeProvider, path: str
) -> None:
    """A provider that answers 503 halfway makes it unavailable, which the visitor can retry, not refused."""
    fake_provider.unavailable_paths = {path}
    with pytest.raises(ProviderUnavailable):
        complete_sign_in()


def test_repr_of_a_client_hides_the_secret() -> None:
    """The representation of a client, as in a traceback, leaves out the client secret."""
    assert CLIENT_SECRET not in repr(Client("https://id.example", CLIENT_ID, CLIENT_SECRET, "openid"))


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "of another"},
        {"state": None},
        {"code": None, "error": "access_denied"},
        {"iss": "https://evil.example"},
    ],
)
def test_callback_of_another_sign_in_is_refused(
    complete_sign_in: CompleteSignIn, answer: dict[str, str | None]
) -> None:
    """A callback with another state, an error or another issuer is refused."""
    with pytest.raises(SignInRefused):
        complete_sign_in(**answer)


@pytest.mark.parametrize(
    "metadata",
    [{"issuer": "https://evil.example"}, {"token_endpoint": "ftp://evil.example"}, {"authorization_endpoint": None}],
)
def test_discovery_with_wrong_metadata_is_retried(fake_provider: FakeProvider, metadata: dict[str, Any]) -> None:
    """Metadata of another issuer or without usable endpoints is unavailable, and the next sign-in looks again."""
    fake_provider.reset()
    fake_provider.metadata = metadata
    provider = OpenIdProvider(Client(fake_provider.address, CLIENT_ID, None, "openid"), Grants(()))
    with pytest.raises(ProviderUnavailable):
        provider.begin_sign_in("http://127.0.0.1/openid/callback")
    fake_provider.reset()
    assert provider.begin_sign_in("http://127.0.0.1/openid/callback")[0].startswith(
        f"{fake_provider.address}/authorize?"
    )


def test_unreachable_provider_is_unavailable() -> None:
    """A provider that cannot be reached is unavailable when starting and when finishing a sign-in."""
    provider = OpenIdProvider(Client("http://127.0.0.1:9", CLIENT_ID, None, "openid"), Grants(()))
    with pytest.raises(ProviderUnavailable):
        provider.begin_sign_in("http://127.0.0.1/openid/callback")
    with pytest.raises(ProviderUnavailable):
        provider.finish_sign_in(SignInState("s", "n", "v"), "http://127.0.0.1/", {"state": "s", "code": "c"})


def test_authlib_is_imported_for_a_provider_only() -> None:
    """A service without an OpenID provider starts without Authlib and its cryptography."""
    script = "import evalstop_service.cli.servers, sys; print(sorted({'authlib', 'joserfc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"

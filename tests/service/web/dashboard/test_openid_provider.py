"""What an OpenID provider has to answer, and what an answer proves: asked of one that lies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.security.openid import (
    DISCOVERY_RETRY_SECONDS,
    DISCOVERY_SECONDS,
    OpenIdProvider,
    ProviderSettings,
    ProviderUnavailable,
    SignInRefused,
    SignInState,
)
from joserfc.jwk import RSAKey

from tests.service.web.dashboard.fake_provider import CLIENT_ID, CLIENT_SECRET, FakeProvider, lying


@pytest.fixture(scope="module")
def liar() -> Iterator[FakeProvider]:
    with lying() as provider:
        yield provider


Finish = Callable[..., dict[str, Any]]


@pytest.fixture
def finish(liar: FakeProvider) -> Finish:
    """Begins a sign-in at the provider, which is honest so far, and finishes it with its answer."""
    liar.tell_truth()

    def finished(**answer: str | None) -> dict[str, Any]:
        provider = OpenIdProvider(ProviderSettings(liar.address, CLIENT_ID, CLIENT_SECRET, "openid email"), utc_now)
        url, begun = provider.begin_sign_in("http://127.0.0.1/openid/callback")
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert asked["code_challenge_method"] == "S256"
        liar.nonce = asked["nonce"]
        said = {"code": "c", "state": asked["state"], **answer}
        kept = {name: value for name, value in said.items() if value is not None}
        return provider.finish_sign_in(begun, "http://127.0.0.1/openid/callback", kept, ("email", "groups"))

    return finished


def test_an_honest_answer_is_taken(finish: Finish, liar: FakeProvider) -> None:
    """The claims of the token, and what it leaves out as the provider tells it besides; PKCE is proved."""
    claims = finish()
    assert (claims["sub"], claims["email"]) == ("1", "dana@example.com")
    assert liar.asked["code_verifier"]
    assert finish(iss=liar.address)["sub"] == "1"


LIES: dict[str, Callable[[FakeProvider], object]] = {
    "an unknown key": lambda liar: setattr(liar, "signs_with", RSAKey.generate_key(2048)),
    "no signature": lambda liar: setattr(liar, "algorithm", "none"),
    "signed with the client's secret": lambda liar: setattr(liar, "algorithm", "HS256"),
    "another issuer": lambda liar: liar.claims.update(iss="https://evil.example"),
    "no issuer": lambda liar: liar.claims.update(iss=None),
    "another audience": lambda liar: liar.claims.update(aud="another-client"),
    "another audience, for this party": lambda liar: liar.claims.update(aud="another-client", azp=CLIENT_ID),
    "another audience too": lambda liar: liar.claims.update(aud=["evalstop", "other"], azp="other"),
    "another nonce": lambda liar: liar.claims.update(nonce="of another sign-in"),
    "no nonce": lambda liar: liar.claims.update(nonce=None),
    "expired": lambda liar: liar.claims.update(exp=1_700_000_000),
    "no expiry": lambda liar: liar.claims.update(exp=None),
    "nobody": lambda liar: liar.claims.update(sub=None),
    "a number for a name": lambda liar: liar.call(1),
    "an empty name": lambda liar: liar.call(""),
    "a name without end": lambda liar: liar.call("x" * 256),
    "a name that cannot be stored": lambda liar: liar.call("a\x00"),
    "claims of somebody else": lambda liar: liar.userinfo.update(sub="2"),
    "no token": lambda liar: liar.raw.update({"/token": b"{}"}),
    "a token that is none": lambda liar: liar.raw.update({"/token": b'{"access_token":"a","id_token":"a.b.c"}'}),
    "no JSON": lambda liar: liar.raw.update({"/token": b"<html>"}),
    "a list": lambda liar: liar.raw.update({"/token": b"[1]"}),
    "keys that are none": lambda liar: liar.raw.update({"/jwks": b'{"keys": [{"kty": "oct"}]}'}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_proves_nothing(finish: Finish, liar: FakeProvider, lie: str) -> None:
    """Whatever else a provider answers lets nobody in."""
    LIES[lie](liar)
    with pytest.raises(SignInRefused):
        finish()


def test_an_address_is_verified_where_it_is_told(finish: Finish, liar: FakeProvider) -> None:
    """That one address was verified says nothing of another."""
    liar.userinfo["groups"] = ["g"]
    liar.claims.update(email="kim@example.com")
    claims = finish()
    assert (claims["email"], claims["email_verified"], claims["groups"]) == ("kim@example.com", None, ["g"])
    liar.claims.update(email=None, email_verified=True)
    liar.userinfo["email_verified"] = False
    claims = finish()
    assert (claims["email"], claims["email_verified"]) == ("dana@example.com", False)


def test_keys_change(liar: FakeProvider) -> None:
    """Each sign-in is proved by the keys that the provider has then: a new one is believed, one taken back is not."""
    liar.tell_truth()
    provider = OpenIdProvider(ProviderSettings(liar.address, CLIENT_ID, CLIENT_SECRET, "openid"), utc_now)

    def signed_in() -> dict[str, Any]:
        url, begun = provider.begin_sign_in("http://127.0.0.1/openid/callback")
        (liar.nonce,) = parse_qs(urlsplit(url).query)["nonce"]
        return provider.finish_sign_in(
            begun, "http://127.0.0.1/openid/callback", {"code": "c", "state": begun.state}, ()
        )

    assert signed_in()["sub"] == "1"
    former, liar.key = liar.key, RSAKey.generate_key(2048, {"kid": "one"})  # by the same name, or by none
    try:
        with pytest.raises(SignInRefused):
            signed_in()
        liar.signs_with = liar.key
        assert signed_in()["sub"] == "1"
    finally:
        liar.key = former


@pytest.mark.parametrize("path", ["/token", "/jwks", "/userinfo"])
def test_a_provider_that_fails_is_away(finish: Finish, liar: FakeProvider, path: str) -> None:
    """A provider that breaks down in the middle of it disproves nothing: that it is to be tried again is said."""
    liar.broken = {path}
    with pytest.raises(ProviderUnavailable):
        finish()


def test_an_issuer_that_is_always_told(finish: Finish, liar: FakeProvider) -> None:
    """A provider that says to name itself in each answer has to."""
    liar.metadata = {"authorization_response_iss_parameter_supported": True}
    assert finish(iss=liar.address)["sub"] == "1"
    with pytest.raises(SignInRefused):
        finish()


def test_the_secret_is_not_shown() -> None:
    """Terms that end up in a traceback or a log do not tell the secret."""
    assert CLIENT_SECRET not in repr(ProviderSettings("https://id.example", CLIENT_ID, CLIENT_SECRET, "openid"))


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "of another"},
        {"state": None},
        {"code": None, "error": "access_denied"},
        {"iss": "https://evil.example"},
    ],
)
def test_an_answer_to_something_else_proves_nothing(finish: Finish, answer: dict[str, str | None]) -> None:
    """Nor does what is no answer to what this browser began, or one of another provider."""
    with pytest.raises(SignInRefused):
        finish(**answer)


@pytest.mark.parametrize(
    "metadata",
    [{"issuer": "https://evil.example"}, {"token_endpoint": "ftp://evil.example"}, {"authorization_endpoint": None}],
)
def test_another_provider_than_was_named_is_none(liar: FakeProvider, metadata: dict[str, Any]) -> None:
    """What is found has to be what was named, and is looked for again the next time."""
    liar.tell_truth()
    liar.metadata = metadata
    provider = OpenIdProvider(ProviderSettings(liar.address, CLIENT_ID, None, "openid"), utc_now)
    with pytest.raises(ProviderUnavailable):
        provider.begin_sign_in("http://127.0.0.1/openid/callback")
    liar.tell_truth()
    assert provider.begin_sign_in("http://127.0.0.1/openid/callback")[0].startswith(f"{liar.address}/authorize?")


NOT_FOUND: dict[str, Callable[[FakeProvider], object]] = {
    "away": lambda liar: liar.broken.add("/.well-known/openid-configuration"),
    "another": lambda liar: liar.metadata.update(issuer="https://evil.example"),
    "without keys": lambda liar: liar.metadata.update(jwks_uri=None),
}


@pytest.mark.parametrize("how", NOT_FOUND)
def test_a_provider_that_moves(liar: FakeProvider, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is looked for again after an hour; if it is not found then, it is taken to be where it was, and that is
    logged."""
    liar.tell_truth()
    moment = utc_now()
    provider = OpenIdProvider(ProviderSettings(liar.address, CLIENT_ID, None, "openid"), lambda: moment)

    def asks() -> str:
        return urlsplit(provider.begin_sign_in("http://127.0.0.1/openid/callback")[0]).path

    assert asks() == "/authorize"
    liar.metadata = {"authorization_endpoint": f"{liar.address}/moved"}
    assert asks() == "/authorize"
    moment += timedelta(seconds=DISCOVERY_SECONDS)
    assert asks() == "/moved"
    moment += timedelta(seconds=DISCOVERY_SECONDS)
    NOT_FOUND[how](liar)
    with caplog.at_level(logging.WARNING):
        assert asks() == asks() == "/moved"
    assert sum("could not be discovered again" in record.getMessage() for record in caplog.records) == 1
    liar.tell_truth()
    moment += timedelta(seconds=DISCOVERY_RETRY_SECONDS)
    assert asks() == "/authorize"


def test_a_provider_that_is_away_is_said_to_be() -> None:
    """Nobody is told that they were not believed when nobody was asked."""
    provider = OpenIdProvider(ProviderSettings("http://127.0.0.1:9", CLIENT_ID, None, "openid"), utc_now)
    with pytest.raises(ProviderUnavailable):
        provider.begin_sign_in("http://127.0.0.1/openid/callback")
    with pytest.raises(ProviderUnavailable):
        provider.finish_sign_in(SignInState("s", "n", "v"), "http://127.0.0.1/", {"state": "s", "code": "c"}, ())

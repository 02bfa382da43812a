"""Encryption of secrets at rest: bound to their endpoint, with rotating keys."""

from __future__ import annotations

import base64
import uuid

import pytest
from evalstop_service.security.encryption import PREFIX, Encryption, UnreadableSecret, parse_keys
from hypothesis import given
from hypothesis import strategies as st

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
OWNER = uuid.UUID(int=7)


@given(secret=st.text(max_size=200), owner=st.uuids())
def test_encrypted_secret_can_be_decrypted(secret: str, owner: uuid.UUID) -> None:
    """Any secret of any endpoint is restored, and is not visible in its encrypted form."""
    encrypted = Encryption([OLD]).encrypt(secret, owner)
    assert encrypted.startswith(PREFIX)
    assert len(secret) < 4 or secret not in encrypted
    assert Encryption([NEW, OLD]).decrypt(encrypted, owner) == secret


def test_first_key_encrypts_and_every_key_decrypts() -> None:
    """After a rotation the old key is needed until a secret is encrypted again."""
    before = Encryption([OLD]).encrypt("whsec_a", OWNER)
    both = Encryption([NEW, OLD])
    assert both.decrypt(before, OWNER) == "whsec_a"
    after = both.encrypt("whsec_a", OWNER)
    assert Encryption([NEW]).decrypt(after, OWNER) == "whsec_a"


@pytest.mark.parametrize("keys", [[], [NEW]])
def test_missing_key_is_named_in_the_error(keys: list[bytes]) -> None:
    """The error names setting and endpoint."""
    encrypted = Encryption([OLD]).encrypt("whsec_a", OWNER)
    with pytest.raises(UnreadableSecret, match=f"EVALSTOP_SECRET_KEYS.*{OWNER}"):
        Encryption(keys).decrypt(encrypted, OWNER)


def test_secret_of_another_endpoint_is_unreadable() -> None:
    """A ciphertext that was changed, or moved to another endpoint, is refused."""
    encryption = Encryption([OLD])
    encrypted = encryption.encrypt("whsec_a", OWNER)
    assert encryption.decrypt(encrypted, OWNER) == "whsec_a"
    changed = encrypted[:-6] + ("AAAAA=" if not encrypted.endswith("AAAAA=") else "BBBBB=")
    for owner, text in ((uuid.UUID(int=8), encrypted), (OWNER, changed), (OWNER, encrypted[:20])):
        with pytest.raises(UnreadableSecret):
            encryption.decrypt(text, owner)


def test_secrets_are_plain_without_keys() -> None:
    """A plain secret remains readable after keys are configured."""
    assert Encryption().encrypt("whsec_a", OWNER) == "whsec_a"
    assert Encryption([OLD]).decrypt("whsec_a", OWNER) == "whsec_a"


def test_keys_are_parsed_from_base64() -> None:
    """Keys are 32 bytes in either alphabet, separated by commas."""
    key = bytes([0xFB] * 32)
    text = f"{base64.b64encode(key).decode()}, {base64.urlsafe_b64encode(key).decode()},"
    assert parse_keys(text) == [key, key]
    assert parse_keys(None) == parse_keys("") == []


@pytest.mark.parametrize("text", ["short", base64.b64encode(bytes(16)).decode(), "not base64!", "AAAA," + "x" * 43])
def test_invalid_key_is_refused_without_showing_it(text: str) -> None:
    """The error has the command that creates a key."""
    with pytest.raises(ValueError, match="openssl rand -base64 32") as error:
        parse_keys(text)
    assert text not in str(error.value)

"""Secrets at rest: sealed with keys from the environment, bound to their endpoint, and never lost with a key."""

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
def test_what_is_sealed_opens(secret: str, owner: uuid.UUID) -> None:
    """A sealed secret opens to what it was, and shows nothing of it."""
    kept = Encryption([OLD]).encrypt(secret, owner)
    assert kept.startswith(PREFIX)
    assert len(secret) < 4 or secret not in kept
    assert Encryption([NEW, OLD]).decrypt(kept, owner) == secret


def test_the_first_key_seals_and_all_open() -> None:
    """A new key is put first; what the old one sealed still opens, until it is sealed anew."""
    before = Encryption([OLD]).encrypt("whsec_a", OWNER)
    both = Encryption([NEW, OLD])
    assert both.decrypt(before, OWNER) == "whsec_a"
    after = both.encrypt("whsec_a", OWNER)
    assert Encryption([NEW]).decrypt(after, OWNER) == "whsec_a"


@pytest.mark.parametrize("keys", [[], [NEW]])
def test_without_the_key_it_says_so(keys: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    """Without its key a secret does not open; the error names endpoint, key and setting, in the log once."""
    kept = Encryption([OLD]).encrypt("whsec_a", OWNER)
    encryption = Encryption(keys)
    for _ in range(3):
        with pytest.raises(UnreadableSecret, match=f"{OWNER}.*EVALSTOP_SECRET_KEYS"):
            encryption.decrypt(kept, OWNER)
    assert len(caplog.records) == 1


def test_a_secret_belongs_to_its_endpoint() -> None:
    """A sealed secret that is moved to another endpoint, or changed, does not open."""
    encryption = Encryption([OLD])
    kept = encryption.encrypt("whsec_a", OWNER)
    assert encryption.decrypt(kept, OWNER) == "whsec_a"
    changed = kept[:-6] + ("AAAAA=" if not kept.endswith("AAAAA=") else "BBBBB=")
    for owner, text in ((uuid.UUID(int=8), kept), (OWNER, changed), (OWNER, kept[:20]), (OWNER, kept + "*")):
        with pytest.raises(UnreadableSecret):
            encryption.decrypt(text, owner)


def test_without_keys_nothing_is_sealed() -> None:
    """Without a key secrets stand as they are, and those from then open later too."""
    assert Encryption().encrypt("whsec_a", OWNER) == "whsec_a"
    assert Encryption([OLD]).decrypt("whsec_a", OWNER) == "whsec_a"


def test_keys_are_read_from_a_setting() -> None:
    """Keys are 32 bytes in base64, of either alphabet, separated by commas."""
    key = bytes([0xFB] * 32)
    text = f"{base64.b64encode(key).decode()}, {base64.urlsafe_b64encode(key).decode()},"
    assert parse_keys(text) == [key, key]
    assert parse_keys(None) == parse_keys("") == []


@pytest.mark.parametrize("text", ["short", base64.b64encode(bytes(16)).decode(), "not base64!", "AAAA," + "x" * 43])
def test_what_is_no_key_is_refused(text: str) -> None:
    """A key of another length is refused, with the way to make one and without showing it."""
    with pytest.raises(ValueError, match="openssl rand -base64 32") as caught:
        parse_keys(text)
    assert text not in str(caught.value)

"""Sealed secrets in the rows of endpoints: signing with both, waiting for a key, and sealing anew."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.security.encryption import PREFIX, Encryption, UnreadableSecret
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases, pull
from evalstop_service.store.tables import endpoints as rows

from tests.service.webhooks.delivery.fakes import EPOCH, Scene

OLD, NEW = bytes(range(32)), bytes(range(1, 33))


def test_both_secrets_sign_while_both_are_valid(database: Database, scene: Scene) -> None:
    """A claimed delivery carries the present and the previous secret, opened; the rows hold neither."""
    encryption = Encryption([OLD])
    with database.transaction() as tx:
        first = endpoints.add_endpoint(
            tx, scene.project_id, url="http://x.example", event_types=["*"], now=EPOCH, encryption=encryption
        )
        second = endpoints.rotate_secret(tx, scene.project_id, first.id, now=EPOCH, encryption=encryption)
        assert second is not None
        scene.announce(tx)
        (claimed,) = leases.claim_deliveries(tx, EPOCH, 60, 1, 1, encryption=encryption)
        kept = tx.execute(sa.select(rows.c.secret, rows.c.previous_secret, rows.c.signing_key)).one()
    present = (second.secret, first.secret, first.signing_key)
    assert claimed.secrets == tuple(encryption.decrypt(secret, first.id) for secret in present)
    assert [secret.partition("_")[0] for secret in claimed.secrets] == ["whsec", "whsec", "whsk"]
    assert all(secret.startswith(PREFIX) for secret in kept)


def test_without_a_key_deliveries_wait(database: Database, scene: Scene) -> None:
    """What cannot be signed waits with the reason, spends no attempt, holds up no other endpoint, and goes later."""
    with database.transaction() as tx:
        sealed = endpoints.add_endpoint(
            tx,
            scene.project_id,
            url="http://sealed.example",
            event_types=["*"],
            now=EPOCH,
            encryption=Encryption([OLD]),
        )
        plain = scene_endpoint = endpoints.add_endpoint(
            tx, scene.project_id, url="http://plain.example", event_types=["*"], now=EPOCH
        )
        scene.announce(tx)
        for encryption in (Encryption(), Encryption([NEW])):
            for one in leases.claim_deliveries(tx, EPOCH, 60, 8, 8, encryption=encryption):
                assert one.endpoint_id == plain.id
        (waits,) = scene.all(tx, endpoint_id=sealed.id)
        assert (waits.state, waits.attempts) == ("waiting", 0)
        assert waits.due_at == EPOCH + timedelta(seconds=leases.UNREADABLE_PAUSE_SECONDS)
        assert "EVALSTOP_SECRET_KEYS" in str(waits.last_error)
        claimed = leases.claim_deliveries(tx, waits.due_at, 60, 8, 8, encryption=Encryption([NEW, OLD]))
        assert [(one.endpoint_id, one.attempts) for one in claimed if one.endpoint_id != scene_endpoint.id] == [
            (sealed.id, 1)
        ]


def test_what_is_fetched_is_sealed_too(database: Database, scene: Scene) -> None:
    """A pull endpoint's events are signed with its opened secret, and wait where there is no key."""
    encryption = Encryption([OLD])
    with database.transaction() as tx:
        endpoint = pull.add_pull_endpoint(
            tx, scene.project_id, name="node", event_types=["*"], now=EPOCH, encryption=encryption
        )
        scene.announce(tx)
        with pytest.raises(UnreadableSecret):
            pull.claim_deliveries(tx, endpoint, EPOCH, 60, 1, Encryption([NEW]))
        (claimed,) = pull.claim_deliveries(tx, endpoint, EPOCH, 60, 1, encryption)
    present = (endpoint.secret, endpoint.signing_key)
    assert claimed.secrets == tuple(encryption.decrypt(secret, endpoint.id) for secret in present)
    assert claimed.attempts == 1


def test_all_are_sealed_anew(database: Database, scene: Scene) -> None:
    """Sealing anew takes all secrets to the first key, those in plain text too, and changes none of them."""
    with database.transaction() as tx:
        plain = endpoints.add_endpoint(tx, scene.project_id, url="http://plain.example", event_types=["*"], now=EPOCH)
        old = endpoints.add_endpoint(
            tx, scene.project_id, url="http://old.example", event_types=["*"], now=EPOCH, encryption=Encryption([OLD])
        )
        endpoints.rotate_secret(tx, scene.project_id, old.id, now=EPOCH, encryption=Encryption([OLD]))
        done = endpoints.reencrypt_secrets(tx, Encryption([NEW, OLD]))
        assert (done.secrets, done.were_plain) == (5, 2)
        found = {one.id: one for one in endpoints.list_endpoints(tx, scene.project_id)}
    only = Encryption([NEW])
    assert only.decrypt(found[plain.id].secret, plain.id) == plain.secret
    assert only.decrypt(found[plain.id].signing_key, plain.id) == plain.signing_key
    assert found[old.id].previous_secret is not None
    assert only.decrypt(found[old.id].previous_secret or "", old.id) == Encryption([OLD]).decrypt(old.secret, old.id)


def test_sealing_anew_is_all_or_nothing(database: Database, scene: Scene) -> None:
    """When one secret does not open, or there is no key, nothing is changed."""
    with database.transaction() as tx:
        endpoints.add_endpoint(tx, scene.project_id, url="http://plain.example", event_types=["*"], now=EPOCH)
        endpoints.add_endpoint(
            tx, scene.project_id, url="http://old.example", event_types=["*"], now=EPOCH, encryption=Encryption([OLD])
        )
        before = endpoints.list_endpoints(tx, scene.project_id)
    for encryption in (Encryption([NEW]), Encryption()):
        with pytest.raises(UnreadableSecret), database.transaction() as tx:
            endpoints.reencrypt_secrets(tx, encryption)
    with database.reading() as tx:
        assert endpoints.list_endpoints(tx, scene.project_id) == before

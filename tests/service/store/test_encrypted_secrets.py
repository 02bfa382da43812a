"""Endpoints in the store: changes, rotation, deletion, and their encrypted signing secrets."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.errors import NotFound
from evalstop_service.security.encryption import PREFIX, Encryption, UnreadableSecret
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import Dead
from evalstop_service.store.tables import endpoints as endpoint_table

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, seed_project, settle_delivery

OLD_KEY, NEW_KEY = bytes(range(32)), bytes(range(1, 33))


def test_both_valid_secrets_sign(database: Database, project: SeededProject) -> None:
    """A claimed delivery carries the current and the previous secret, decrypted; the rows hold only ciphertext."""
    encryption = Encryption([OLD_KEY])
    with database.transaction() as tx:
        first = endpoints.add_endpoint(
            tx, project.id, url="http://x.example", event_types=["*"], now=EPOCH, encryption=encryption
        )
        second = endpoints.rotate_secret(tx, project.id, first.id, now=EPOCH, encryption=encryption)
        project.add_event(tx)
        (claimed,) = leases.claim_deliveries(tx, EPOCH, 60, 1, 1, encryption=encryption)
        stored = tx.execute(
            sa.select(endpoint_table.c.secret, endpoint_table.c.previous_secret, endpoint_table.c.signing_key)
        ).one()
    present = (second.secret, first.secret, first.signing_key)
    assert claimed.secrets == tuple(encryption.decrypt(secret, first.id) for secret in present)
    assert [secret.partition("_")[0] for secret in claimed.secrets] == ["whsec", "whsec", "whsk"]
    assert all(secret.startswith(PREFIX) for secret in stored)


def test_deliveries_wait_without_a_key(database: Database, project: SeededProject) -> None:
    """Without the key a delivery waits with the reason, uses no attempt and blocks no other endpoint."""
    with database.transaction() as tx:
        encrypted = endpoints.add_endpoint(
            tx,
            project.id,
            url="http://encrypted.example",
            event_types=["*"],
            now=EPOCH,
            encryption=Encryption([OLD_KEY]),
        )
        plain = endpoints.add_endpoint(tx, project.id, url="http://plain.example", event_types=["*"], now=EPOCH)
        project.add_event(tx)
        for encryption in (Encryption(), Encryption([NEW_KEY])):
            for delivery in leases.claim_deliveries(tx, EPOCH, 60, 8, 8, encryption=encryption):
                assert delivery.endpoint_id == plain.id
        (sent_delivery,) = project.list_deliveries(tx, endpoint_id=plain.id)
        assert (sent_delivery.due_at, sent_delivery.attempts) == (EPOCH + timedelta(seconds=60), 1), "it is leased"
        (waiting_delivery,) = project.list_deliveries(tx, endpoint_id=encrypted.id)
        assert (waiting_delivery.state, waiting_delivery.attempts) == ("waiting", 0)
        assert waiting_delivery.due_at == EPOCH + timedelta(seconds=leases.UNREADABLE_PAUSE_SECONDS)
        assert "EVALSTOP_SECRET_KEYS" in str(waiting_delivery.last_error)
        claimed = leases.claim_deliveries(
            tx, waiting_delivery.due_at, 60, 8, 8, encryption=Encryption([NEW_KEY, OLD_KEY])
        )
        assert [
            (delivery.endpoint_id, delivery.attempts) for delivery in claimed if delivery.endpoint_id != plain.id
        ] == [(encrypted.id, 1)]


@pytest.mark.parametrize("keys", [[NEW_KEY, OLD_KEY], [NEW_KEY]], ids=["replaced", "lost"])
def test_rotated_endpoint_needs_the_first_key_alone(
    database: Database, project: SeededProject, keys: list[bytes]
) -> None:
    """After its secret was rotated an endpoint gets its webhooks without the key that encrypted it before."""
    with database.transaction() as tx:
        before = endpoints.add_endpoint(
            tx, project.id, url="http://x.example", event_types=["*"], now=EPOCH, encryption=Encryption([OLD_KEY])
        )
        after = endpoints.rotate_secret(tx, project.id, before.id, now=EPOCH, encryption=Encryption(keys))
        project.add_event(tx)
        (claimed,) = leases.claim_deliveries(tx, EPOCH, 60, 1, 1, encryption=Encryption([NEW_KEY]))
    kept = len(keys) == 2
    assert [secret.partition("_")[0] for secret in claimed.secrets] == ["whsec"] * (1 + kept) + ["whsk"]
    assert (after.public_key == before.public_key) is kept


def test_pull_endpoint_needs_the_key(database: Database, project: SeededProject) -> None:
    """A pull endpoint's events are signed with its decrypted secret; without the key the claim raises."""
    encryption = Encryption([OLD_KEY])
    with database.transaction() as tx:
        endpoint = endpoints.add_endpoint(
            tx, project.id, url="pull:node", event_types=["*"], now=EPOCH, encryption=encryption
        )
        project.add_event(tx)
        with pytest.raises(UnreadableSecret):
            leases.pull_deliveries(tx, endpoint, EPOCH, 60, 1, Encryption([NEW_KEY]))
        (claimed,) = leases.pull_deliveries(tx, endpoint, EPOCH, 60, 1, encryption)
    present = (endpoint.secret, endpoint.signing_key)
    assert claimed.secrets == tuple(encryption.decrypt(secret, endpoint.id) for secret in present)
    assert claimed.attempts == 1


def test_deleting_an_endpoint_cancels_its_deliveries(database: Database, project: SeededProject) -> None:
    """A deleted endpoint is not listed, its waiting deliveries are cancelled, and none can be retried."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        project.add_event(tx)
        project.add_event(tx)
        claimed = claim_deliveries(tx, EPOCH, 10, 1)[0]
        settle_delivery(tx, claimed, Dead("HTTP 400"), EPOCH)
        endpoints.delete_endpoint(tx, project.id, endpoint.id, now=EPOCH)
        with pytest.raises(NotFound):
            endpoints.delete_endpoint(tx, project.id, endpoint.id, now=EPOCH)
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) is None
        assert endpoints.list_endpoints(tx, project.id) == []
        assert sorted(delivery.state for delivery in project.list_deliveries(tx)) == ["cancelled", "dead"]


def test_update_changes_only_given_fields(database: Database, project: SeededProject) -> None:
    """An update leaves unnamed fields alone, and waiting deliveries go to the new URL."""
    endpoint = project.add_endpoint(database, "http://old.example")
    with database.transaction() as tx:
        project.add_event(tx)
        changed = endpoints.update_endpoint(tx, project.id, endpoint.id, url="http://new.example")
        expected = ("http://new.example", endpoint.event_types, True)
        assert (changed.url, changed.event_types, changed.enabled) == expected
        assert endpoints.update_endpoint(tx, project.id, endpoint.id) == changed
        assert claim_deliveries(tx, EPOCH, 10, 1)[0].url == "http://new.example"


def test_rotated_secret_overlaps_with_the_previous(database: Database, project: SeededProject) -> None:
    """After a rotation both secrets sign for a day, then only the new one."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        rotated = endpoints.rotate_secret(tx, project.id, endpoint.id, now=EPOCH)
        project.add_event(tx)
        project.add_event(tx)
        during = claim_deliveries(tx, EPOCH + timedelta(hours=23), 10, 1)[0]
        after = claim_deliveries(tx, EPOCH + timedelta(hours=24), 10, 1)[0]
    assert during.secrets == (rotated.secret, endpoint.secret, endpoint.signing_key)
    assert after.secrets == (rotated.secret, endpoint.signing_key)
    assert rotated.secret != endpoint.secret


def test_endpoint_is_hidden_from_other_projects(database: Database, project: SeededProject) -> None:
    """Another project can neither see, change, rotate nor delete an endpoint."""
    endpoint = project.add_endpoint(database, "http://x.example")
    other_project_id = seed_project(database).id
    with database.transaction() as tx:
        with pytest.raises(NotFound):
            endpoints.load_endpoint(tx, other_project_id, endpoint.id)
        with pytest.raises(NotFound):
            endpoints.update_endpoint(tx, other_project_id, endpoint.id, url="http://evil.example")
        with pytest.raises(NotFound):
            endpoints.rotate_secret(tx, other_project_id, endpoint.id, now=EPOCH)
        with pytest.raises(NotFound):
            endpoints.delete_endpoint(tx, other_project_id, endpoint.id, now=EPOCH)
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) == endpoint

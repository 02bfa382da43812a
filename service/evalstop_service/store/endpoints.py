"""Endpoints: where a project wants its events sent, and the encrypted secrets that sign them."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.errors import NotFound, require
from evalstop_service.security.encryption import Encryption, UnreadableSecret
from evalstop_service.store.database import Transaction, find_all, find_one
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import deliveries, delivery_attempts, endpoints
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.webhooks import Endpoint as Endpoint

UNENCRYPTED = Encryption()
"""Stores secrets as plain text."""

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of a secret, not one
PULL_PREFIX = "pull:"
"""Begins the URL of a pull endpoint, which is the name of its receiver."""

SIGNING_PREFIX, PUBLIC_PREFIX = "whsk_", "whpk_"


def generate_secret() -> str:
    """A new signing secret as Standard Webhooks defines it: `whsec_` and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def generate_key_pair() -> tuple[str, str]:
    """A new Ed25519 signing key `whsk_` and its public key `whpk_`, as Standard Webhooks defines them."""
    private = Ed25519PrivateKey.generate()
    public = base64.b64encode(private.public_key().public_bytes_raw()).decode()
    return SIGNING_PREFIX + base64.b64encode(private.private_bytes_raw()).decode(), PUBLIC_PREFIX + public


def decrypt_secrets(
    endpoint: Endpoint | sa.Row[Any], endpoint_id: UUID, now: datetime, encryption: Encryption
) -> tuple[str, ...]:
    """The secrets to sign with: the current one, and the previous one while it is valid; raises UnreadableSecret."""
    previous, until = endpoint.previous_secret, endpoint.previous_secret_until
    valid = [endpoint.secret] + ([previous] if previous is not None and until is not None and now < until else [])
    return tuple(encryption.decrypt(secret, endpoint_id) for secret in valid)


def decrypt_signing_keys(
    endpoint: Endpoint | sa.Row[Any], endpoint_id: UUID, now: datetime, encryption: Encryption
) -> tuple[str, ...]:
    """What signs its webhooks: its valid secrets, and its signing key; raises UnreadableSecret."""
    secrets = decrypt_secrets(endpoint, endpoint_id, now, encryption)
    return (*secrets, encryption.decrypt(endpoint.signing_key, endpoint_id))


def add_endpoint(
    tx: Transaction,
    project_id: UUID,
    *,
    url: str,
    event_types: Iterable[str],
    now: datetime,
    format: str = "standard",  # noqa: A002 - its name in the API
    encryption: Encryption = UNENCRYPTED,
) -> Endpoint:
    """Create an endpoint, enabled, with its own secret and key pair."""
    key = new_id()
    signing_key, public_key = generate_key_pair()
    endpoint = Endpoint(
        id=key,
        project_id=project_id,
        url=url,
        event_types=tuple(event_types),
        secret=encryption.encrypt(generate_secret(), key),
        previous_secret=None,
        previous_secret_until=None,
        signing_key=encryption.encrypt(signing_key, key),
        public_key=public_key,
        enabled=True,
        created_at=now,
        format=format,
    )
    tx.execute(sa.insert(endpoints).values(vars(endpoint)))
    return endpoint


def find_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint | None:
    """The endpoint with this id; None when the project has none, or it was deleted."""
    return find_one(tx, Endpoint, _FIND, {"of_project": project_id, "of_id": endpoint_id})


def load_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    """Like `find_endpoint`; raises NotFound."""
    return require(find_endpoint(tx, project_id, endpoint_id), f"endpoint {endpoint_id} in this project")


def load_pull_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID) -> Endpoint:
    """Like `load_endpoint`; raises NotFound also if workers send to the endpoint."""
    endpoint = find_endpoint(tx, project_id, endpoint_id)
    is_pulled = endpoint is not None and endpoint.url.startswith(PULL_PREFIX)
    return require(endpoint if is_pulled else None, f"pull endpoint {endpoint_id} in this project")


def list_endpoints(tx: Transaction, project_id: UUID) -> list[Endpoint]:
    """The endpoints of a project, oldest first."""
    return find_all(tx, Endpoint, _LIST, {"of_project": project_id})


def update_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID, **changes: Any) -> Endpoint:
    """Change fields (`url`, `event_types`, `format`, `enabled`); waiting deliveries go to the new URL. Raises NotFound.

    A new URL, or enabling the endpoint, resets its failures, and what failed before is tried again at once.
    """
    may_work = "url" in changes or changes.get("enabled", False)  # the cause of the failures may be gone
    if may_work:
        changes |= {"failures": 0, "open_until": None}
    if changes:
        tx.execute(sa.update(endpoints).where(_is_endpoint(project_id, endpoint_id)).values(changes))
    endpoint = load_endpoint(tx, project_id, endpoint_id)
    if may_work:
        _change_waiting(tx, endpoint_id, _HAS_FAILED, due_at=deliveries.c.created_at)
    return endpoint


def rotate_secret(
    tx: Transaction, project_id: UUID, endpoint_id: UUID, *, now: datetime, encryption: Encryption = UNENCRYPTED
) -> Endpoint:
    """Give the endpoint a new secret; the previous one also signs for a day. Raises NotFound.

    All that it keeps is encrypted with the first key, so that an earlier one is no longer needed for it.
    """
    endpoint = load_endpoint(tx, project_id, endpoint_id)
    try:
        previous: str | None = encryption.decrypt(endpoint.secret, endpoint_id)
        signing_key, public_key = encryption.decrypt(endpoint.signing_key, endpoint_id), endpoint.public_key
    except UnreadableSecret:  # the key that encrypted them is lost
        previous, (signing_key, public_key) = None, generate_key_pair()
    values = {
        "secret": encryption.encrypt(generate_secret(), endpoint_id),
        "previous_secret": previous and encryption.encrypt(previous, endpoint_id),
        "previous_secret_until": now + timedelta(days=1),
        "signing_key": encryption.encrypt(signing_key, endpoint_id),
        "public_key": public_key,
    }
    tx.execute(sa.update(endpoints).where(_is_endpoint(project_id, endpoint_id)).values(values))
    return load_endpoint(tx, project_id, endpoint_id)


def delete_endpoint(tx: Transaction, project_id: UUID, endpoint_id: UUID, *, now: datetime) -> None:
    """Delete the endpoint and cancel its waiting deliveries; past deliveries stay. Raises NotFound."""
    deleted = tx.execute(
        sa.update(endpoints).where(_is_endpoint(project_id, endpoint_id)).values(deleted_at=now, enabled=False)
    ).rowcount
    if not deleted:
        raise NotFound(f"there is no endpoint {endpoint_id} in this project")
    cancelled = {"state": DeliveryState.CANCELLED, "last_error": "the endpoint was deleted", "settled_at": now}
    _change_waiting(tx, endpoint_id, sa.true(), **cancelled)


_HAS_FAILED = sa.exists().where(
    delivery_attempts.c.run_id == deliveries.c.run_id,
    delivery_attempts.c.delivery_id == deliveries.c.id,
    delivery_attempts.c.number == deliveries.c.attempts,
)
"""The last attempt of a waiting delivery has ended; while one is under way, it is not logged yet."""


def _change_waiting(tx: Transaction, endpoint_id: UUID, condition: sa.ColumnElement[bool], **values: Any) -> None:
    """Change the waiting deliveries to an endpoint, which is locked, that meet a condition."""
    waiting = sa.and_(
        deliveries.c.endpoint_id == endpoint_id, deliveries.c.state == sa.literal_column("'waiting'"), condition
    )
    # Locked in key order, as workers settle them: otherwise the two can deadlock.
    in_order = sa.select(deliveries.c.id).where(waiting).order_by(deliveries.c.run_id, deliveries.c.id)
    tx.execute(in_order.with_for_update())
    tx.execute(sa.update(deliveries).where(waiting).values(**values))


def _is_endpoint(project_id: UUID, endpoint_id: UUID) -> sa.ColumnElement[bool]:
    return sa.and_(
        endpoints.c.project_id == project_id, endpoints.c.id == endpoint_id, endpoints.c.deleted_at.is_(None)
    )


_ALL = sa.select(*columns_of(endpoints, Endpoint)).where(
    endpoints.c.project_id == sa.bindparam("of_project"), endpoints.c.deleted_at.is_(None)
)
_LIST = _ALL.order_by(endpoints.c.id)
_FIND = _ALL.where(endpoints.c.id == sa.bindparam("of_id"))

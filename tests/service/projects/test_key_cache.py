"""The key cache authenticates without the database for a while, and never longer than it promises."""

from __future__ import annotations

from evalstop_service.projects import api_keys
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.store import keys
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database

from tests.service.scenes import NOW, Scene


def test_a_key_is_cached_until_it_is_revoked_here(database: Database, scene: Scene) -> None:
    """A key is found in the cache once it was authenticated; revoked in this process it stops working at once."""
    cache = KeyCache(database, 60.0)
    key, secret = api_keys.create_key(database, scene.project_id, "test", "trainers", ["ingest"], NOW)
    assert cache.get(secret) is None
    assert cache.authenticate(secret) == cache.get(secret) == key
    assert cache.authenticate("esk_wrong") is None
    api_keys.revoke_key(database, cache, Author(scene.project_id, "test", NOW), key.id)
    assert cache.get(secret) is None
    assert cache.authenticate(secret) is None


def test_without_a_cache_every_request_reads_the_database(database: Database, scene: Scene) -> None:
    """With 0 seconds a key that another process revoked stops working with the next request."""
    cache = KeyCache(database, 0.0)
    key, secret = api_keys.create_key(database, scene.project_id, "test", "trainers", ["ingest"], NOW)
    assert cache.authenticate(secret) == key
    assert cache.get(secret) is None
    with database.transaction() as tx:
        keys.revoke_key(tx, scene.project_id, key.id, NOW)
    assert cache.authenticate(secret) is None

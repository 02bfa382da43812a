"""Runs the migrations on the connection that `evalstop migrate` hands over."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes["metadata"],
    render_as_batch=True,  # SQLite alters a table by building it anew
    transactional_ddl=True,
    transaction_per_migration=True,  # unless the connection comes with a transaction, which is then kept to
)
with context.begin_transaction():
    context.run_migrations()

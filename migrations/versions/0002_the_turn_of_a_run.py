"""Where gold turned, told with hindsight when a run ends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
deploy = "before"


def upgrade() -> None:
    op.add_column("runs", sa.Column("turn", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "turn")

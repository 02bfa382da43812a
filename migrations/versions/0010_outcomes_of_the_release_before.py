"""What replicas of release 0.1.0 still wrote as outcomes of decisions is taken over, once none of them is left."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
deploy = "after"

_LEFT = """
INSERT INTO run_outcomes (run_id, attempt, sequence, outcome, turn_step, derived, actor, note, details, at)
SELECT o.run_id, d.attempt, o.sequence + 1000000, o.outcome, o.turn_step, {false}, o.actor, o.note, '{{}}', o.at
FROM outcomes AS o JOIN decisions AS d ON d.run_id = o.run_id AND d.id = o.decision_id
WHERE NOT EXISTS (
    SELECT 1 FROM run_outcomes AS r
    WHERE r.run_id = o.run_id AND r.attempt = d.attempt AND r.actor = o.actor AND r.at = o.at
)
"""


def upgrade() -> None:
    false = "false" if op.get_context().dialect.name == "postgresql" else "0"
    op.execute(_LEFT.format(false=false))


def downgrade() -> None:
    """Nothing to take back."""

"""Changes the description of a run: when it is opened, and by people, whose changes are in the audit log."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from evalstop_service.domain.run import NOTHING_SAID, DescriptionIn, RunDescription
from evalstop_service.store import run_details, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.runs import Run


def describe_run(database: Database, author: Author, run_id: UUID, change: DescriptionIn) -> None:
    """Change owner, group, tags or notes of a run; raises NotFound. The audit log omits notes: they may be long."""
    with database.transaction() as tx:
        # Locked, so that concurrent changes do not overwrite each other.
        run = runs.lock_run(tx, author.project_id, run_id)
        before = run_details.load_descriptions(tx, [run_id])[run_id]
        after = change.change(before)
        if after != before:
            run_details.save_description(tx, author.project_id, run_id, after, author.at)
            old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
            details = {name: value for name, value in new.items() if value != old[name]}
            if "notes" in details:
                details["notes"] = f"{len(after.notes)} characters"
            author.record(tx, "run.described", f"run {run.name}", details)


def fill_description(tx: Transaction, run: Run, description: RunDescription, now: datetime) -> None:
    """Store the trainer's description of its run in empty fields: what people have written since is kept."""
    if description == NOTHING_SAID:
        return
    before = run_details.load_descriptions(tx, [run.id])[run.id]
    after = RunDescription(
        before.owner or description.owner,
        before.group or description.group,
        before.tags or description.tags,
        before.notes or description.notes,
    )
    if after != before:
        run_details.save_description(tx, run.project_id, run.id, after, now)

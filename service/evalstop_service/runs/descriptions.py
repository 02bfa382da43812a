"""Changes the description of a run: when it is opened, and by people, whose changes are in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from operator import attrgetter
from uuid import UUID

import msgspec

from evalstop_service.domain.run import MOST_STEP_NOTES, NOTHING_SAID, RunDescription, StepNote
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.store import run_details, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run


def describe_run(
    database: Database, author: Author, run_id: UUID, change: Callable[[RunDescription], RunDescription]
) -> None:
    """Change what people say of a run; raises NotFound. The audit log omits notes: they may be long."""
    with database.transaction() as tx:
        # Locked, so that concurrent changes do not overwrite each other.
        run = runs.lock_run(tx, author.project_id, run_id)
        before = run_details.load_descriptions(tx, [run_id])[run_id]
        after = change(before)
        if after != before:
            run_details.save_description(tx, author.project_id, run_id, after, author.at)
            old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
            details = {name: value for name, value in new.items() if value != old[name]}
            if "notes" in details:
                details["notes"] = f"{len(after.notes)} characters"
            if "step_notes" in details:
                details["step_notes"] = [note["step"] for note in details["step_notes"]]
            author.record(tx, "run.described", f"run {run.name}", details)


def add_step_note(database: Database, author: Author, run_id: UUID, step: int, text: str) -> None:
    """Add a note at a step of a run; raises NotFound, and Conflict if the run has too many."""
    note = StepNote(new_id(), step, text, author.actor, author.at)

    def add(before: RunDescription) -> RunDescription:
        if len(before.step_notes) >= MOST_STEP_NOTES:
            raise Conflict(f"the run has {MOST_STEP_NOTES} notes at steps; remove one first")
        notes = sorted([*before.step_notes, note], key=attrgetter("step"))
        return msgspec.structs.replace(before, step_notes=tuple(notes))

    describe_run(database, author, run_id, add)


def remove_step_note(database: Database, author: Author, run_id: UUID, note_id: UUID) -> None:
    """Remove a note at a step of a run; raises NotFound."""

    def remove(before: RunDescription) -> RunDescription:
        kept = tuple(note for note in before.step_notes if note.id != note_id)
        if kept == before.step_notes:
            raise NotFound(f"there is no note {note_id} on this run")
        return msgspec.structs.replace(before, step_notes=kept)

    describe_run(database, author, run_id, remove)


def fill_description(tx: Transaction, run: Run, description: RunDescription, now: datetime) -> bool:
    """Store the trainer's description of its run in empty fields: what people have written since is kept.

    Returns whether the run has joined a group.
    """
    if description == NOTHING_SAID:
        return False
    before = run_details.load_descriptions(tx, [run.id])[run.id]
    filled = {name: value for name, value in msgspec.structs.asdict(before).items() if value}
    after = msgspec.structs.replace(description, **filled)
    if after != before:
        run_details.save_description(tx, run.project_id, run.id, after, now)
    return after.group != before.group

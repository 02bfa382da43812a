"""Descriptions that people give a run: owner, group, tags and notes. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from evalstop_service.domain.fields import Body, Name, Plain

MOST_TAGS = 50
LONGEST_TAG = 100
LONGEST_NOTES = 20_000

Tag = Annotated[Name, Field(max_length=LONGEST_TAG)]


class RunDescription(msgspec.Struct, frozen=True):
    """The stored description. `group`: the runs that it is compared with."""

    owner: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""


NOTHING_SAID = RunDescription()


class DescriptionIn(Body):
    """A change of a description. An omitted field stays as it is; null clears it."""

    owner: Name | None = Field(
        None, description="who is notified: an e-mail address, or any name", examples=["dana@example.org"]
    )
    group: Name | None = Field(
        None, description="what it is compared with: a sweep, or the seeds of one configuration", examples=["ppo-7b"]
    )
    tags: Annotated[list[Tag], Field(max_length=MOST_TAGS)] | None = Field(
        None, description="short words to find it by", examples=[["baseline"]]
    )
    notes: Annotated[str, Field(max_length=LONGEST_NOTES), Plain] | None = Field(
        None, description="text for people, of any number of lines", examples=["the grader was down from 14:00 on"]
    )

    def change(self, before: RunDescription) -> RunDescription:
        """The description after this change."""
        changed = {name: getattr(self, name) for name in DescriptionIn.model_fields if name in self.model_fields_set}
        if "tags" in changed:
            changed["tags"] = tuple(dict.fromkeys(changed["tags"] or ()))
        if "notes" in changed:
            changed["notes"] = changed["notes"] or ""
        return msgspec.structs.replace(before, **changed)

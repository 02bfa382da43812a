"""What lists are filtered by, the same in the API and on the dashboard, and their pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query
from pydantic import BaseModel, Field

from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.fields import Integral, Line, Name, Plain, Rule
from evalstop_service.domain.run import Call
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, RunStatus, Treatment
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.web.api.schemas import Time


class ListQuery(BaseModel):
    """Which page of a list; a list with filters adds them."""

    cursor: UUID | None = Field(None, description="`next_cursor` of the previous page; default: the first page")
    limit: int = Field(50, ge=1, le=200, description="maximum number of items per page")

    def to_arguments(self) -> dict[str, Any]:
        """The arguments of the store's function that lists them."""
        chosen = dict(self)
        return {"before": chosen.pop("cursor"), **chosen}


class CreatedQuery(ListQuery):
    """Which page of a list of what was created at some time."""

    since: Time | None = Field(None, description="created at this time or later")
    until: Time | None = Field(None, description="created before this time")


def _check_label(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals or '"' in name or "\\" in name:
        raise ValueError("write NAME=VALUE, the name without quotes and backslashes")
    return text


Label = Annotated[str, Field(max_length=2300), Plain, Rule(_check_label, {"pattern": r'^[^="\\\x00-\x1f\x7f-\x9f]+='})]

_SAME_FIELDS = ("status", "verdict", "policy", "mode", "owner", "group", "since", "until")


class RunQuery(BaseModel):
    """Which runs to list; omitted filters match every run."""

    name: Annotated[str, Field(max_length=256), Plain] | None = Field(None, description="part of the name")
    status: RunStatus | None = Field(None, description="running, or how it ended")
    verdict: Call | None = Field(None, description="its policy's current verdict")
    policy: Name | None = Field(None, description="watched by a policy of this name")
    mode: Mode | None = Field(None, description="enforce: a stop is carried out; shadow: it is recorded")
    owner: Name | None = Field(None, description="the owner, exactly")
    group: Name | None = Field(None, description="the group, exactly")
    tag: Annotated[list[Name], Field(max_length=10)] = Field(
        [], description="a tag of the run; with several, all must match"
    )
    label: Annotated[list[Label], Field(max_length=10)] = Field(
        [], description="NAME=VALUE, a label of the run; with several, all must match"
    )
    job_kind: Name | None = Field(None, description="its label job_kind")
    since: Time | None = Field(None, description="opened at this time or later")
    until: Time | None = Field(None, description="opened before this time")

    def to_filter(self, before: UUID | None = None) -> RunFilter:
        """The filter for the store; `before`: the last run of the previous page."""
        same = {name: getattr(self, name) for name in _SAME_FIELDS}
        labels = [(name, value) for name, _, value in (item.partition("=") for item in self.label)]
        labels += [("job_kind", self.job_kind)] if self.job_kind else []
        return RunFilter(**same, name=self.name or None, tags=tuple(self.tag), labels=tuple(labels), before=before)


class RunListQuery(RunQuery, ListQuery):
    """Which runs to list, and which page."""


Version = Annotated[int, Field(ge=1, le=2**31 - 1), Integral] | None


async def _choose_cases(
    policy: Annotated[Name | None, Query(description="the name of the policy")] = None,
    version: Annotated[Version, Query(description="version of the policy")] = None,
    detector: Annotated[
        Name | None, Query(description="a detector that called for a stop, deciding or observing")
    ] = None,
    job_kind: Annotated[Line | None, Query(description="the label job_kind of the run; empty: without one")] = None,
    since: Annotated[Time | None, Query(description="ended at this time or later")] = None,
    until: Annotated[Time | None, Query(description="ended before this time")] = None,
) -> CaseFilter:
    return CaseFilter(policy, version, detector, job_kind, since, until)


ChosenCases = Annotated[CaseFilter, Depends(_choose_cases)]
"""The filter of the cases that are counted or listed."""


async def _choose_listed_cases(
    chosen: ChosenCases,
    flagged: Annotated[bool | None, Query(description="whether the policy wanted a stop")] = None,
    treatment: Annotated[Treatment | None, Query(description="what was done with the stop")] = None,
    outcome: Annotated[
        DecisionOutcome | None, Query(description="of the decision to stop it, or of letting it run")
    ] = None,
    run_outcome: Annotated[RunOutcome | None, Query(description="whether the eval turned")] = None,
    called: Annotated[
        bool | None,
        Query(description="with detector: false if it did not call, be it that it was not asked; default: true"),
    ] = None,
    silent: Annotated[Name | None, Query(description="another detector, which did not call")] = None,
) -> CaseFilter:
    return replace(
        chosen,
        flagged=flagged,
        treatment=treatment,
        outcome=outcome,
        run_outcome=run_outcome,
        called=called,
        silent=silent,
    )


ListedCases = Annotated[CaseFilter, Depends(_choose_listed_cases)]
"""The filter of a list of cases."""

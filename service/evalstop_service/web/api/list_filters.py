"""What lists are filtered by, the same in the API and on the dashboard, and their pages."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

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


class CaseQuery(BaseModel):
    """Which cases to count or to list; omitted filters match every case."""

    policy: Name | None = Field(None, description="the name of the policy")
    version: Annotated[int, Field(ge=1, le=2**31 - 1), Integral] | None = Field(
        None, description="version of the policy"
    )
    detector: Name | None = Field(None, description="a detector that called for a stop, deciding or observing")
    job_kind: Line | None = Field(None, description="the label job_kind of the run; empty: without one")
    since: Time | None = Field(None, description="ended at this time or later")
    until: Time | None = Field(None, description="ended before this time")

    def to_filter(self) -> CaseFilter:
        """The filter for the store."""
        names = CaseFilter.__dataclass_fields__
        return CaseFilter(**{name: value for name, value in self if name in names})


class ListedCaseQuery(CaseQuery, ListQuery):
    """Which cases to list, and which page."""

    flagged: bool | None = Field(None, description="whether the policy wanted a stop")
    treatment: Treatment | None = Field(None, description="what was done with the stop")
    outcome: DecisionOutcome | None = Field(None, description="of the decision to stop it, or of letting it run")
    run_outcome: RunOutcome | None = Field(None, description="whether the eval turned")
    silent: Name | None = Field(None, description="another detector, which did not call")

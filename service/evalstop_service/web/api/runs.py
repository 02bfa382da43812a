"""Routes of runs: open, read, resume, finish, stop."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Path, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from evalstop_service.decisions import commands, group_rules, notices, second_person
from evalstop_service.domain.fields import Body, Integral, Line, Mode, Name, Plain
from evalstop_service.domain.run import NOTHING_SAID, DescriptionIn, DetectorCall
from evalstop_service.errors import Invalid
from evalstop_service.ingest import Content, EvalChanged, Exploited, Message, Resumed, list_calls
from evalstop_service.ingest import open_run as run_opening
from evalstop_service.ingest.open_request import describe_limits, offer_rule
from evalstop_service.projects import api_keys
from evalstop_service.runs.descriptions import add_step_note, describe_run, remove_step_note
from evalstop_service.store import projects, run_lists, runs
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.web.api.decisions import read_label
from evalstop_service.web.api.groups import RULE, RuleDocument
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.list_filters import RunListQuery
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.roles import EvalVersion, Watched, complete_directions, read_eval_version
from evalstop_service.web.api.run_views import (
    OutcomesOut,
    RunOut,
    answer_trainer,
    view_outcomes,
    view_run,
    view_runs,
)
from evalstop_service.web.api.schemas import ActionIn, Answer, OutcomeIn, Page, RunId, Step, answers
from evalstop_service.web.context import Caller, Context, Ctx, DatabaseNow, Db, Ingest, Now, Operate, Read, ReadOrIngest
from evalstop_service.webhooks.event_data import Alert

router = create_router("runs", prefix=f"{API}/runs")

MOST_PARAMS = 1000


class RunIn(DescriptionIn):
    """A run to open. An omitted field keeps its value, or gets the project's default in a new run."""

    name: Name = Field(description="unique in the project", examples=["ppo-7b-seed3"])
    metrics: Watched | None = Field(
        None,
        description="the role of each watched metric, or auto: roles are recognized by metric names while the run "
        "reports. By default metrics named eval, proxy, kl and loss have these roles",
        examples=[{"reward/gold": {"role": "eval"}, "reward/proxy": {"role": "proxy"}, "kl": {"role": "kl"}}],
    )
    labels: Annotated[dict[Name, Line], Field(max_length=100)] | None = Field(
        None,
        description="how a receiver finds the job; merged into existing labels",
        examples=[{"slurm_job_id": "4711"}],
    )
    policy: Annotated[str, Field(max_length=100), Plain] | None = Field(
        None, description="NAME or NAME@VERSION", examples=["paper"]
    )
    mode: Mode | None = Field(
        None, description="shadow: decisions are recorded; enforce: the run is stopped. Default: the project's mode"
    )
    total_steps: Annotated[int, Field(ge=1, le=MAX_STEP), Integral] | None = Field(
        None, description="the planned length: with it, decisions come sooner. Default: from a label or param"
    )
    params: Annotated[dict[Name, Line], Field(max_length=MOST_PARAMS)] | None = Field(
        None,
        description="hyperparameters, such as the learning rate; those of an existing run stay",
        examples=[{"optimizer.lr": "1e-6"}],
    )
    population: RuleDocument | None = Field(
        None,
        description="the rule of its `group`, unless that has one; docs/sweeps.md describes the fields",
        examples=[RULE],
    )
    eval_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="checkpoints can be evaluated on request: the share of the run's time that one eval takes, 0 if "
        "unknown",
    )
    job: Line | None = Field(
        None,
        description="identifies the job, the same for all processes of it: the same job, or a request without a job, "
        "attaches to a running run of this name; another job opens a new run",
        examples=["slurm:alpha:4711"],
    )
    opening: UUID | None = Field(
        None, strict=False, description="idempotency key: the same id does not open a second run"
    )
    key_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None,
        description="SHA-256 of the key that the trainer was started with, if what it recorded may be sent later with "
        "another key: refused (409) if that key belongs to another project",
    )
    resume: Literal["must", "allow"] | None = Field(
        None,
        description="continue the latest run opened with this name, even if it has ended; must: fail if there is "
        "none, allow: else open a new run",
    )


class ResumeIn(Body):
    """The checkpoint from which the trainer resumes."""

    step: Step = Field(description="the step of the checkpoint; later observations are superseded")


class ExploitedIn(Body):
    """The copy that the trainer has made."""

    decision_id: UUID = Field(strict=False, description="`exploit.decision_id`, as the trainer was given it")


class EvalChangeIn(Body):
    """The eval is measured differently from a step on: another grader, eval set or set of prompts."""

    step: Step = Field(description="the first step measured differently", examples=[120])
    reason: Annotated[str, Field(min_length=1, max_length=500), Plain] = Field(
        description="what changed, for people", examples=["the grader was made stricter"]
    )
    version: EvalVersion | None = Field(None, description="the eval version from there on")


class AlertIn(Body):
    """What the trainer tells people."""

    id: UUID | None = Field(None, strict=False, description="idempotency key: the same id raises one alert")
    title: Name = Field(description="a short headline", examples=["the grader is slow"])
    text: Line = Field("", description="details, for people", examples=["9 s an answer instead of 2"])


class StepNoteIn(Body):
    """A note at a step, for people."""

    step: Step = Field(description="the training step that it is about", examples=[1200])
    text: Name = Field(description="what the chart shows", examples=["the grader was restarted"])


NoteId = Annotated[UUID, Path(description="`id` of the note, from the run's `step_notes`")]


class FinishIn(Body):
    """How the run ended."""

    status: Literal["completed", "failed"] = Field(description="failed: it ended with an error")
    obeyed: UUID | None = Field(
        None,
        strict=False,
        description="with completed: the decision because of which the trainer ended the run. The decision is then "
        "`obeyed` and the run `stopped`",
    )


_SAME_FIELDS = ("labels", "policy", "mode", "total_steps", "params", "eval_share", "job", "opening")
"""Fields of the body that a request to open a run has too."""


@answers(DetectorCall)
class CallOut(Answer):
    """A detector's evidence now, and its first call for a stop."""


class CallsOut(Answer):
    """The detectors of a run's policy."""

    attempt: int = Field(description="the current attempt of the run, whose calls these are")
    items: list[CallOut] = Field(description="those with a say first, then observers, in the order of the policy")


@router.post("", status_code=201, responses={200: {"model": RunOut, "description": "An existing run."}})
def open_run(body: RunIn, caller: Ingest, context: Ctx, database: Db, now: Now, response: Response) -> RunOut:
    """Open a run, or attach to one: 201 for a new run, 200 for an existing one.

    A job attaches to its own running run of this name. The name of a run that has ended, or of another job, opens a
    new run called `name-2`. A run keeps its policy and mode (409). A mode or policy that the project
    does not allow is replaced, as `limits` reports.
    """
    rule = None if body.population is None else group_rules.parse_rule(body.population.root)
    if rule is not None and not body.group:
        raise Invalid("population: a rule compares the runs of a group; give the run a group", "population")
    if body.key_hash is not None:
        api_keys.refuse_key_of_another_project(database, caller.project_id, body.key_hash)
    if body.total_steps is not None or body.resume is not None:
        context.committer.costs.require_room(caller.key.id, caller.project_id)
    metrics = body.metrics
    request = run_opening.OpenRequest(
        body.name,
        metrics=complete_directions(metrics) if isinstance(metrics, dict) else None,
        eval_version=read_eval_version(metrics) if isinstance(metrics, dict) else None,
        recognise=metrics == "auto",
        **{name: getattr(body, name) for name in _SAME_FIELDS},
        resume=run_opening.Resume(body.resume) if body.resume else None,
        actor=caller.actor,
        key=caller.key,
        description=body.change(NOTHING_SAID),
    )
    run, created = run_opening.open_run(database, caller.project_id, request, now)
    response.status_code = 201 if created else 200
    with database.reading() as tx:
        project = projects.get_project(tx, caller.project_id)
        limits = describe_limits(project, request, run)
    if rule is not None and body.group:
        limits += offer_rule(database, caller.author(now), body.group, rule)
    return answer_trainer(run, context, now).model_copy(update={"limits": limits})


@router.get("")
def list_runs(
    caller: Read, context: Ctx, database: Db, now: Now, query: Annotated[RunListQuery, Query()]
) -> Page[RunOut]:
    """The project's runs, newest first. Most filters search only the newest 20,000."""
    with database.reading() as tx:
        listed = run_lists.list_runs(tx, caller.project_id, query.to_filter(query.cursor), query.limit)
        return Page[RunOut].of(view_runs(tx, listed, context, now), query.limit)


@router.get("/{run_id}")
def get_run(run_id: RunId, caller: ReadOrIngest, context: Ctx, database: Db, now: Now) -> RunOut:
    """Status, verdict, best checkpoint and decision of a run.

    A key with the scope `ingest`, but not `operate`, is taken for the trainer's: `should_stop` then hands the stop
    over, and it cannot be vetoed any more.
    """
    with database.reading() as tx:
        run = runs.load_run(tx, caller.project_id, run_id)
        # Whoever may veto is a person that looks at the run: to look must not take the veto away.
        if "ingest" not in caller.key.scopes or "operate" in caller.key.scopes:
            return view_run(tx, run, context, now)
    return answer_trainer(run, context, now)


def _read_run(run_id: UUID, caller: Caller, context: Context, now: datetime) -> RunOut:
    """A run for a person, whose look hands nothing over."""
    with context.database.reading() as tx:
        return view_run(tx, runs.load_run(tx, caller.project_id, run_id), context, now)


@router.patch("/{run_id}")
def change_run(run_id: RunId, body: DescriptionIn, caller: Operate, context: Ctx, now: Now) -> RunOut:
    """Change the description of a run: owner, group, tags, notes."""
    describe_run(context.database, caller.author(now), run_id, body.change)
    return _read_run(run_id, caller, context, now)


def _commit(run_id: UUID, content: Content, caller: Caller, context: Context, now: datetime) -> RunOut:
    """Commit what a trainer says of its run, and answer it."""
    receipt = context.committer.submit_and_wait(Message(caller.project_id, run_id, content))
    return answer_trainer(receipt.run, context, now)


@router.post("/{run_id}/resume")
def resume_run(run_id: RunId, body: ResumeIn, caller: Ingest, context: Ctx, now: Now) -> RunOut:
    """Start a new attempt from a checkpoint; later observations of the earlier attempt are superseded."""
    with context.database.reading() as tx:
        run_opening.require_room_to_resume(tx, caller.project_id, run_id, now)
    return _commit(run_id, Resumed(body.step, caller.actor), caller, context, now)


@router.post("/{run_id}/exploited")
def confirm_exploit(run_id: RunId, body: ExploitedIn, caller: Ingest, context: Ctx, now: Now) -> RunOut:
    """Confirm the copy of another run: the run goes on from its checkpoint, in a new attempt.

    What it observed after that step is superseded, and its evals are no longer compared with those before. 409: the
    copy was vetoed, or the run has resumed since; it then goes on from its own checkpoint.
    """
    return _commit(run_id, Exploited(body.decision_id, caller.actor), caller, context, now)


@router.post("/{run_id}/eval-changes")
def change_eval(run_id: RunId, body: EvalChangeIn, caller: Ingest, context: Ctx, now: Now) -> RunOut:
    """Report that the eval is measured differently from a step on. Levels before and after it are not compared.

    The report may come before or after the observations. The first report for a step stands.
    """
    change = EvalChanged(body.step, body.reason, body.version, caller.actor)
    return _commit(run_id, change, caller, context, now)


@router.post("/{run_id}/heartbeat")
def record_heartbeat(run_id: RunId, caller: Ingest, context: Ctx, database: Db, now: Now) -> RunOut:
    """Report that the run is alive although it has no new observations, as during a long eval; takes no body."""
    run = run_opening.record_heartbeat(database, caller.project_id, run_id, now)
    return answer_trainer(run, context, now)


@router.post("/{run_id}/alerts")
def post_alert(run_id: RunId, body: AlertIn, caller: Ingest, context: Ctx, database: Db, now: Now) -> RunOut:
    """Tell people of something: endpoints get the event `run.alert`, and the run's page shows it. A run may raise 20
    alerts an hour (409)."""
    alert = Alert(body.id or new_id(), body.title, body.text)
    with database.transaction() as tx:
        run = notices.raise_alert(tx, caller.project_id, run_id, alert, now)
    return answer_trainer(run, context, now)


@router.post("/{run_id}/notes")
def add_note(run_id: RunId, body: StepNoteIn, caller: Operate, context: Ctx, database: Db, now: Now) -> RunOut:
    """Add a note at a step; the run's chart shows it. A run may have 100 (409)."""
    add_step_note(database, caller.author(now), run_id, body.step, body.text)
    return _read_run(run_id, caller, context, now)


@router.delete("/{run_id}/notes/{note_id}", status_code=204)
def remove_note(run_id: RunId, note_id: NoteId, caller: Operate, database: Db, now: Now) -> None:
    """Remove a note from a run."""
    remove_step_note(database, caller.author(now), run_id, note_id)


@router.post("/{run_id}/finish")
def finish_run(run_id: RunId, body: FinishIn, caller: Ingest, context: Ctx, database: Db, now: Now) -> RunOut:
    """Report that the trainer ended the run: by itself, or because it saw the decision to stop it."""
    obeyed = body.obeyed if body.status == "completed" else None
    commands.finish_run(database, caller.project_id, run_id, body.status, now, obeyed=obeyed, actor=caller.actor)
    return _read_run(run_id, caller, context, now)


@router.post("/{run_id}/stop", response_model=RunOut, responses=WAITS)
def stop_run(
    run_id: RunId, body: ActionIn, caller: Operate, context: Ctx, database: Db, now: DatabaseNow
) -> RunOut | JSONResponse:
    """Stop the run now, regardless of policy and mode; not while the project is paused."""
    waiting = second_person.stop_run(database, caller.author(now), run_id, body.reason)
    return _read_run(run_id, caller, context, now) if waiting is None else answer_proposal(waiting, now)


@router.get("/{run_id}/outcomes")
def list_run_outcomes(
    run_id: RunId,
    caller: Read,
    database: Db,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="default: the current one")] = None,
) -> OutcomesOut:
    """All outcomes of an attempt, by people and from later evals."""
    with database.reading() as tx:
        run = runs.load_run(tx, caller.project_id, run_id)
        return view_outcomes(tx, run.id, attempt or run.attempt)


@router.post("/{run_id}/outcome")
def label_run(run_id: RunId, body: OutcomeIn, caller: Operate, database: Db, now: Now) -> OutcomesOut:
    """Label whether letting the run continue, or stopping it, was right; a new label replaces the earlier one."""
    run = commands.label_run(database, caller.project_id, run_id, read_label(body, caller, now))
    with database.reading() as tx:
        return view_outcomes(tx, run.id, run.attempt)


@router.get("/{run_id}/calls")
def list_run_calls(run_id: RunId, caller: Read, database: Db) -> CallsOut:
    """What each detector of the run's policy makes of the run, those with a say first: its evidence now, and the step
    at which it first called for a stop in this attempt."""
    with database.reading() as tx:
        run = runs.load_run(tx, caller.project_id, run_id)
        return CallsOut(attempt=run.attempt, items=[CallOut.model_validate(item) for item in list_calls(tx, run)])

"""`evalstop runs`, `groups`, `decisions` and `precision`: runs, what was decided, and whether it was right."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from evalstop_client.cli.command import (
    OK,
    Subcommands,
    add_command,
    add_group,
    add_limit,
    connect,
    print_table,
    show_facts,
    show_list,
    show_result,
)
from evalstop_client.cli.policies import read_document
from evalstop_client.latest_answer import ENDED
from evalstop_client.reading.api import Call, Mode, RunStatus, State, parse_moment
from evalstop_client.reading.records import DecisionRecord, Outcome, pick_columns
from evalstop_client.settings import parse_pairs

FILTERS = {
    "name": "part of the name",
    "status": "whether it runs, or how it ended",
    "verdict": "what its policy calls for",
    "policy": "name of the policy",
    "mode": "whether stops are carried out",
    "owner": "the owner",
    "group": "the group",
    "since": "opened since: 15m, 12h, 30d, or a time",
}
"""Help of the options of `ls` that are passed on to `Api.runs`."""

CHOICES = {"status": get_args(RunStatus), "verdict": get_args(Call), "mode": get_args(Mode)}

RUN_COLUMNS = (
    "name status mode policy last_step verdict=verdict.verdict decision=decision.state "
    "best_step=best_checkpoint.step best_score=best_checkpoint.score created_at"
)


def add_runs(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "runs", text)
    listing = add_command(verbs, "ls", list_runs)
    for name, description in FILTERS.items():
        listing.add_argument(f"--{name}", help=description, choices=CHOICES.get(name))
    listing.add_argument("--tag", action="append", default=[], help="only runs with this tag")
    listing.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="only runs with this label")
    add_limit(listing)
    add_command(verbs, "compare", compare_runs).add_argument("runs", nargs="+", metavar="RUN", help="names or ids")
    add_command(verbs, "show", show_run, "run")
    add_command(verbs, "stop", stop_run, "run").add_argument("--reason", required=True, help="recorded with the stop")


def list_runs(options: argparse.Namespace) -> int:
    """List runs, newest first."""
    filters = {name: getattr(options, name) for name in FILTERS}
    table = connect(options).runs(**filters, tags=options.tag, labels=dict(parse_pairs(options.label, "label")))
    return show_list(options, [run.document for run in islice(table, options.limit)], RUN_COLUMNS)


def compare_runs(options: argparse.Namespace) -> int:
    """Show runs side by side: their results, and the labels and params in which they differ."""
    api = connect(options)
    documents = [api.run(name).document for name in options.runs]
    if options.json:
        return show_result(options, documents, "")
    results = [pick_columns(document, RUN_COLUMNS) for document in documents]
    given = [document["labels"] | document["params"] for document in documents]
    differing = [name for name in dict.fromkeys(chain(*given)) if len({item.get(name) for item in given}) > 1]
    shown = [result | {name: item.get(name) for name in differing} for result, item in zip(results, given, strict=True)]
    names = [name for name in shown[0] if name != "name"]
    print_table([{"": name, **{item["name"]: item[name] for item in shown}} for name in names])
    return OK


def show_run(options: argparse.Namespace) -> int:
    """Show a run: how it is watched, its verdict, decision and best checkpoint, and which detectors called."""
    api = connect(options)
    document = api.run(options.run).document
    calls = api.connection.get(f"/runs/{document['id']}/calls")["items"]
    facts = pick_columns(
        document,
        "name url status attempt mode policy metrics last_step total_steps verdict=verdict.verdict "
        "reason=verdict.reason decision=decision.state decision_reason=decision.state_reason decision_id=decision.id "
        "best_step=best_checkpoint.step best_score=best_checkpoint.score best_uri=best_checkpoint.uri owner group tags "
        "notes labels created_at ended_at",
    )
    roles = {name: role["role"] for name, role in document["metrics"].items()}
    show_facts(options, document | {"calls": calls}, facts | {"metrics": roles or "none has a role"})
    if not options.json:
        print_table([pick_columns(call, "detector observes step called_at evidence threshold note") for call in calls])
    return OK


def stop_run(options: argparse.Namespace) -> int:
    """Stop a run now, regardless of its policy and mode."""
    run = connect(options).run(options.run).stop(options.reason)
    return show_result(options, run.document, f"the stop of {run.name} is {run.decision}")


def add_precision(commands: Subcommands, text: str) -> None:
    shown = add_command(commands, "precision", show_precision)
    shown.add_argument("--by", choices=("policy", "detector"), default="policy", help="default: %(default)s")
    shown.add_argument("--policy", help="only runs of the policy of this name")
    shown.add_argument("--since", help="only runs that ended since then: 15m, 12h, 30d, or a time")


def show_precision(options: argparse.Namespace) -> int:
    """Show how often each policy, or each detector on the same runs, was right; GPU-hours saved are those of stops."""
    by, named = (["policy"], "") if options.by == "policy" else (["policy", "detector"], "detector observes ")
    query = {"group_by": by, "policy": options.policy, "since": parse_moment(options.since)}
    groups = connect(options).connection.get("/precision", query)["groups"]
    figures = "precision recall false_stops_per_healthy_run delay_steps=delay_steps.median"
    hours = "gpu_hours_saved=gpu_hours.saved gpu_hours_would_have_saved=gpu_hours.would_have_saved"
    return show_list(options, groups, f"policy {named}{figures} {hours}")


def add_groups(commands: Subcommands, text: str) -> None:
    ruling = add_command(add_group(commands, "groups", text), "rule", set_rule, "group")
    ruling.add_argument("rule", metavar="RULE", help="median, a JSON file, or none to remove the rule")


def set_rule(options: argparse.Namespace) -> int:
    """Set, change or remove the rule of a group; to change or remove one requires the scope operate."""
    connection, path = connect(options).connection, f"/groups/{quote(options.group, safe='')}"
    if options.rule == "none":
        connection.delete(path)
        return show_result(options, {}, f"group {options.group} has no rule")
    is_kind = Path(options.rule).suffix == ""
    group = connection.post(path, {"kind": options.rule} if is_kind else read_document(options.rule))
    return show_result(options, group, f"group {options.group} has the rule {group['rule']['kind']}")


def add_decisions(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "decisions", text)
    listing = add_command(verbs, "ls", list_decisions)
    listing.add_argument("--state", help="only decisions in this state", choices=get_args(State))
    listing.add_argument("--run", metavar="RUN", help="only decisions on this run, by name or id")
    listing.add_argument("--policy", help="only decisions by this policy")
    listing.add_argument("--since", help="only decisions since then: 15m, 12h, 30d, or a time")
    add_limit(listing)
    for name, run in (("veto", veto), ("release", release), ("undo", undo)):
        command = add_command(verbs, name, run, "decision")
        command.add_argument("--reason", required=True, help="recorded with the decision")
    labeling = add_command(verbs, "label", label, "decision")
    labeling.add_argument("outcome", choices=get_args(Outcome), help="whether the decision was right")
    labeling.add_argument("--turn-step", type=int, metavar="STEP", help="step where the eval turned")
    labeling.add_argument("--note", default="", help="recorded with the label")


def list_decisions(options: argparse.Namespace) -> int:
    """List decisions, newest first."""
    table = connect(options).decisions(
        state=options.state, run_id=options.run, policy=options.policy, since=options.since
    )
    documents = [decision.document for decision in islice(table, options.limit)]
    return show_list(
        options, documents, "id run=run_name step state policy outcome=outcome.outcome created_at reason=state_reason"
    )


def veto(options: argparse.Namespace) -> int:
    """Cancel a stop that is on hold or pending: the run continues. By the decision's id, or the name of its run."""
    return _print_decision(connect(options).decision(options.decision).veto(options.reason), options)


def release(options: argparse.Namespace) -> int:
    """Carry out a stop that is on hold, despite its guards."""
    return _print_decision(connect(options).decision(options.decision).release(options.reason), options)


def undo(options: argparse.Namespace) -> int:
    """Undo a requested stop, or resume a parked job; receivers resume the job if they can."""
    api = connect(options)
    undone = api.decision(options.decision).undo(options.reason)
    ended = api.run(undone.run_id).status in ENDED
    return _print_decision(undone, options, "; the run has ended: nothing resumes" if ended else "")


def label(options: argparse.Namespace) -> int:
    """Label whether a stop was right."""
    decision = connect(options).decision(options.decision)
    labeled = decision.label(options.outcome, options.note, turn_step=options.turn_step)
    return _print_decision(labeled, options, f", and was {labeled.outcome['outcome']}")


def _print_decision(decision: DecisionRecord, options: argparse.Namespace, addition: str = "") -> int:
    return show_result(options, decision.document, f"the stop of {decision.run_name} is {decision.state}{addition}")

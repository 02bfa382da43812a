"""`evalstop runs`, `groups`, `decisions` and `precision`: runs, what was decided, and whether it was right."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from typing import get_args
from urllib.parse import quote

from evalstop_client.cli.command import (
    OK,
    Shown,
    Subcommands,
    add_command,
    add_group,
    connect,
    format_number,
    parse_count,
    print_facts,
    print_json,
    print_table,
    show_list,
    show_result,
)
from evalstop_client.cli.policies import read_document
from evalstop_client.latest_answer import ENDED
from evalstop_client.reading.api import Call, Mode, RunStatus, State, parse_moment
from evalstop_client.reading.records import DecisionRecord, RunRecord
from evalstop_client.service import Json
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


def add_runs(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "runs", text)
    listing = add_command(verbs, "ls", list_runs, "list")
    for name, description in FILTERS.items():
        listing.add_argument(f"--{name}", help=description, choices=CHOICES.get(name))
    listing.add_argument("--tag", action="append", default=[], help="only runs with this tag")
    listing.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="only runs with this label")
    listing.add_argument(
        "--limit", type=parse_count, default=50, metavar="N", help="maximum number (default: %(default)s)"
    )
    comparing = add_command(verbs, "compare", compare_runs)
    comparing.add_argument("runs", nargs="+", metavar="RUN", help="names or ids")
    shown = add_command(verbs, "show", show_run)
    stop = add_command(verbs, "stop", stop_run)
    stop.add_argument("--reason", required=True, help="recorded with the decision")
    note = add_command(verbs, "note", note_run)
    note.add_argument("--step", type=int, required=True, help="the training step that it is about")
    for command in (shown, stop, note):
        command.add_argument("run", metavar="RUN", help="its name or id")
    note.add_argument("text", metavar="TEXT", help="what the chart shows there")


def list_runs(options: argparse.Namespace) -> int:
    """List runs, newest first."""
    filters = {name: getattr(options, name) for name in FILTERS}
    table = connect(options).runs(**filters, tags=options.tag, labels=dict(parse_pairs(options.label, "label")))
    runs = list(islice(table, options.limit))
    return show_list(options, [run.document for run in runs], _COLUMNS, map(_list_cells, runs))


def compare_runs(options: argparse.Namespace) -> int:
    """Show runs side by side: their results, and the labels and params in which they differ."""
    api = connect(options)
    runs = [api.run(name) for name in options.runs]
    results = [dict(zip(_COLUMNS, _list_cells(run), strict=True)) for run in runs]
    given = [run.labels | run.document.get("params", {}) for run in runs]
    differing = [name for name in dict.fromkeys(chain(*given)) if len({item.get(name) for item in given}) > 1]
    rows = [(name, *(result[name] for result in results)) for name in _COLUMNS[1:]]
    rows += [(name, *(item.get(name) for item in given)) for name in differing]
    return show_list(options, [run.document for run in runs], ("", *(run.name for run in runs)), rows)


def show_run(options: argparse.Namespace) -> int:
    """Show a run: how it is watched, its verdict, decision and best checkpoint, and which detectors called."""
    api = connect(options)
    run = api.run(options.run)
    calls = api.connection.get(f"/runs/{run.id}/calls")["items"]
    if options.json:
        print_json(run.document | {"calls": calls})
        return OK
    best, decision = run.best_checkpoint, run.decision
    roles = ", ".join(f"{name} ({role['role']})" for name, role in run.metrics.items())
    print_facts(
        [
            ("name", run.name),
            ("page", run.url),
            ("status", f"{run.status}, attempt {run.attempt}"),
            ("mode", run.mode),
            ("policy", run.policy),
            ("metrics", roles or "none has a role"),
            ("step", f"{run.last_step or 0} of {run.total_steps or 'an unknown number'}"),
            ("verdict", f"{run.verdict}: {run.verdict.reason}"),
            ("decision", f"{decision}: {decision.reason}" if decision else "none"),
            ("decision id", decision.id if decision else None),
            *((f"{item['detector']}{' (observes)' * item['observes']}", _describe_call(item)) for item in calls),
            ("best checkpoint", f"step {best.step}, score {format_number(best.score)}, {best.uri}" if best else "none"),
            ("owner", run.owner),
            ("group", run.group),
            ("tags", ", ".join(run.tags) or None),
            ("notes", run.notes or None),
            *((f"note at step {note['step']}", note["text"]) for note in run.document.get("step_notes", ())),
            ("labels", ", ".join(f"{name}={value}" for name, value in run.labels.items()) or None),
            ("opened", run.created_at),
            ("ended", run.ended_at),
        ]
    )
    return OK


def _describe_call(item: Json) -> str:
    """When a detector first called for a stop, and its evidence now."""
    called = "no call" if item["step"] is None else f"called at step {item['step']}, {item['called_at']}"
    if item["evidence"] is None:
        return f"{called}; nothing seen yet"
    limit = "" if item["threshold"] is None else f" of {format_number(item['threshold'])}"
    return f"{called}; now {format_number(item['evidence'])}{limit}: {item['note']}"


def add_precision(commands: Subcommands, text: str) -> None:
    shown = add_command(commands, "precision", show_precision)
    shown.add_argument("--by", choices=("policy", "detector"), default="policy", help="default: %(default)s")
    shown.add_argument("--policy", help="only runs of the policy of this name")
    shown.add_argument("--since", help="only runs that ended since then: 15m, 12h, 30d, or a time")


def show_precision(options: argparse.Namespace) -> int:
    """Show how often each policy, or each detector on the same runs, was right: the share with its interval."""
    by = ["policy", "detector"] if options.by == "detector" else ["policy"]
    query = {"group_by": by, "policy": options.policy, "since": parse_moment(options.since)}
    groups = connect(options).connection.get("/precision", query)["groups"]
    columns = (
        options.by,
        "of",
        "precision",
        "recall",
        "false stops per healthy run",
        "median delay",
        "saved",
        "would have saved",
    )
    return show_list(options, groups, columns, map(_list_figures, groups))


def _list_figures(group: Json) -> list[Shown]:
    policy = f"{group['policy']['name']}@{group['policy']['version']}"
    name = policy if group["detector"] is None else f"{group['detector']}{' (observes)' * group['observes']}"
    shares = [_format_share(group[key]) for key in ("precision", "recall", "false_stops_per_healthy_run")]
    delay, hours = group["delay_steps"], (group["gpu_hours"][key] for key in ("saved", "would_have_saved"))
    saved = [f"{value:,.0f} GPU-hours" for value in hours]
    return [name, policy, *shares, delay and delay["median"], *saved]


def _format_share(share: Json) -> str:
    if share["value"] is None:
        return "-"
    low, value, high = (f"{100 * share[key]:.1f}" for key in ("low", "value", "high"))
    return f"{value} % ({low} to {high})"


def stop_run(options: argparse.Namespace) -> int:
    """Stop a run now, regardless of its policy and mode."""
    run = connect(options).run(options.run).stop(options.reason)
    return show_result(options, run.document, f"the stop of {run.name} is {run.decision}")


def note_run(options: argparse.Namespace) -> int:
    """Add a note at a step of a run; the chart on its page shows it."""
    api = connect(options)
    run = api.run(options.run)
    document = api.connection.post(f"/runs/{run.id}/notes", {"step": options.step, "text": options.text})
    number = len(document["step_notes"])
    count = "1 note at a step" if number == 1 else f"{number} notes at steps"
    return show_result(options, document, f"{run.name} has {count}: {run.url}")


_COLUMNS = ("name", "status", "mode", "policy", "step", "verdict", "decision", "best step", "best score", "opened")


def _list_cells(run: RunRecord) -> tuple[Shown, ...]:
    best = run.best_checkpoint
    return (
        run.name,
        run.status,
        run.mode,
        run.policy,
        run.last_step,
        run.verdict.verdict,
        run.decision.state if run.decision else None,
        best.step if best else None,
        best.score if best else None,
        run.created_at,
    )


def add_groups(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "groups", text)
    add_command(verbs, "ls", list_groups, "list")
    shown, ruling = add_command(verbs, "show", show_group), add_command(verbs, "rule", set_rule)
    for command in (shown, ruling):
        command.add_argument("group", metavar="GROUP", help="its name")
    ruling.add_argument("rule", metavar="RULE", help="median, a JSON file, or none to remove the rule")


def list_groups(options: argparse.Namespace) -> int:
    """List the groups that have a rule."""
    items = connect(options).connection.get("/groups")["items"]
    rows = [(item["name"], item["rule"]["kind"], item["rule"]["mode"], item["actor"]) for item in items]
    return show_list(options, items, ("group", "rule", "mode", "set by"), rows)


def show_group(options: argparse.Namespace) -> int:
    """Show a group: its rule, its runs with what they copied, and what the rule decided."""
    group = connect(options).connection.get(_group_path(options))
    if options.json:
        print_json(group)
        return OK
    print_facts([(name, str(value)) for name, value in (group["rule"] or {"rule": "none"}).items()])
    print_table(("run", "status", "step", "score", "hyperparameters", "copied"), map(_list_member, group["members"]))
    decisions = group["decisions"]
    rows = [(item["run_name"], item["step"], item["action"], item["state"], item["state_reason"]) for item in decisions]
    print_table(("run", "step", "action", "state", "why"), rows)
    return OK


def _list_member(member: Json) -> tuple[Shown, ...]:
    values = ", ".join(f"{name}={value}" for name, value in member["hyperparameters"].items())
    copied = ", ".join(f"{item['source_name']} at step {item['source_step']}" for item in member["descent"])
    return member["name"], member["status"], member["step"], member["score"], values, copied


def set_rule(options: argparse.Namespace) -> int:
    """Set, change or remove the rule of a group; to change or remove one requires the scope operate."""
    connection = connect(options).connection
    if options.rule == "none":
        connection.delete(_group_path(options))
        return show_result(options, {}, f"group {options.group} has no rule")
    rule = read_document("rule", options.rule)
    group = connection.post(_group_path(options), {"kind": rule} if isinstance(rule, str) else rule)
    return show_result(options, group, f"group {options.group} has the rule {group['rule']['kind']}")


def _group_path(options: argparse.Namespace) -> str:
    return f"/groups/{quote(options.group, safe='')}"


def add_decisions(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "decisions", text)
    listing = add_command(verbs, "ls", list_decisions, "list")
    listing.add_argument("--state", help="only decisions in this state", choices=get_args(State))
    listing.add_argument("--run", metavar="RUN", help="only decisions on this run, by name or id")
    listing.add_argument("--policy", help="only decisions by this policy")
    listing.add_argument("--since", help="only decisions since then: 15m, 12h, 30d, or a time")
    listing.add_argument(
        "--limit", type=parse_count, default=50, metavar="N", help="maximum number (default: %(default)s)"
    )
    for name, run in (("veto", veto), ("release", release), ("undo", undo)):
        command = add_command(verbs, name, run)
        command.add_argument("--reason", required=True, help="recorded with the decision")
        _add_decision(command)
    labeling = add_command(verbs, "label", label)
    _add_decision(labeling)
    labeling.add_argument("outcome", choices=["right", "wrong", "unknown"], help="whether the decision was right")
    labeling.add_argument("--turn-step", type=int, metavar="STEP", help="step where the eval turned")
    labeling.add_argument("--note", default="", help="recorded with the label")


def list_decisions(options: argparse.Namespace) -> int:
    """List decisions, newest first."""
    table = connect(options).decisions(
        state=options.state, run_id=options.run, policy=options.policy, since=options.since
    )
    decisions = list(islice(table, options.limit))
    return show_list(
        options,
        [decision.document for decision in decisions],
        ("id", "run", "step", "state", "policy", "outcome", "made", "why"),
        [(d.id, d.run_name, d.step, d.state, d.policy, d.outcome, d.created_at, d.reason) for d in decisions],
    )


def veto(options: argparse.Namespace) -> int:
    """Cancel a stop that is on hold or pending: the run continues."""
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
    return _print_decision(labeled, options, f", and was {labeled.outcome}")


def _add_decision(command: argparse.ArgumentParser) -> None:
    command.add_argument("decision", metavar="DECISION", help="its id, or the name of its run")


def _print_decision(decision: DecisionRecord, options: argparse.Namespace, addition: str = "") -> int:
    return show_result(options, decision.document, f"the stop of {decision.run_name} is {decision.state}{addition}")

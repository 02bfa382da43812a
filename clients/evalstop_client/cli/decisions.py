"""`evalstop decisions`: list, veto, release, undo, label."""

from __future__ import annotations

import argparse
from itertools import islice

from evalstop_client.cli.command import (
    Subcommands,
    add_command,
    add_group,
    connect,
    parse_count,
    show_list,
    show_result,
)
from evalstop_client.errors import NotFound
from evalstop_client.reading.api import Api, is_id
from evalstop_client.reading.records import DecisionRecord


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "decisions", text)
    listing = add_command(verbs, "ls", list_decisions, "list")
    listing.add_argument("--state", help="only decisions in this state, such as on_hold")
    listing.add_argument("--run", metavar="RUN", help="only decisions on this run, by name or id")
    listing.add_argument("--policy", help="only decisions by this policy")
    listing.add_argument("--since", help="only decisions since then: 12h, 30d, or a time")
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
    api = connect(options)
    run_id = None if options.run is None else options.run if is_id(options.run) else api.run(options.run).id
    table = api.decisions(state=options.state, run_id=run_id, policy=options.policy, since=options.since)
    decisions = list(islice(table, options.limit))
    return show_list(
        options,
        [decision.document for decision in decisions],
        ("id", "run", "step", "state", "policy", "outcome", "made", "why"),
        [(d.id, d.run_name, d.step, d.state, d.policy, d.outcome, d.created_at, d.reason) for d in decisions],
    )


def veto(options: argparse.Namespace) -> int:
    """Cancel a stop that is on hold or pending: the run continues."""
    return _print_decision(_find_decision(connect(options), options.decision).veto(options.reason), options)


def release(options: argparse.Namespace) -> int:
    """Carry out a stop that is on hold, despite its guards."""
    return _print_decision(_find_decision(connect(options), options.decision).release(options.reason), options)


def undo(options: argparse.Namespace) -> int:
    """Undo a requested stop, or resume a parked job; receivers resume the job if they can."""
    return _print_decision(_find_decision(connect(options), options.decision).undo(options.reason), options)


def label(options: argparse.Namespace) -> int:
    """Label whether a stop was right."""
    decision = _find_decision(connect(options), options.decision)
    labeled = decision.label(options.outcome, options.note, turn_step=options.turn_step)
    return _print_decision(labeled, options, f", and was {labeled.outcome}")


def _add_decision(command: argparse.ArgumentParser) -> None:
    command.add_argument("decision", metavar="DECISION", help="its id, or the name of its run")


def _find_decision(api: Api, id_or_run: str) -> DecisionRecord:
    if is_id(id_or_run):
        return api.decision(id_or_run)
    decision = api.run(id_or_run).decision
    if decision is None:
        raise NotFound(f"there is no decision on the run {id_or_run!r}.")
    return decision


def _print_decision(decision: DecisionRecord, options: argparse.Namespace, addition: str = "") -> int:
    return show_result(options, decision.document, f"the stop of {decision.run_name} is {decision.state}{addition}")

"""`evalstop-receiver watch-tensorboard`: reports TensorBoard logs."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path

from evalstop_client.backoff import wait_seconds
from evalstop_client.errors import ConfigurationError, KeyRefused, ServiceAway
from evalstop_client.metric_roles import AUTO, DIRECTIONS, METRIC_ROLES
from evalstop_client.receivers.stop.options import (
    add_seconds,
    add_url_options,
    choose_state_folder,
    parse_pairs,
    require_service,
)
from evalstop_client.receivers.stop.processes import ShutdownSignal
from evalstop_client.service import Service
from evalstop_client.settings import MODES, parse_labels
from evalstop_client.tensorboard.report import Watch

logger = logging.getLogger("evalstop_client.tensorboard")

EXAMPLES = """\
examples:
  # each folder with event files below runs/ is a run, called runs/<folder>; roles are recognized by the tags
  evalstop-receiver watch-tensorboard runs

  # Keras writes train/ and validation/: one run, tags train/epoch_loss and validation/epoch_loss
  evalstop-receiver watch-tensorboard logs --one-run --name classifier --metric validation/epoch_loss=eval:minimize

  # labels with which a receiver finds the job to stop
  evalstop-receiver watch-tensorboard runs --label slurm_job_id=4711 --label slurm_cluster=alpha --mode enforce

  # report existing files, and exit
  evalstop-receiver watch-tensorboard old-runs --once

It saves its position (--state). The files do not show whether a trainer has ended or died: without --once, a silent
run becomes `lost` after a while. A restarted trainer writes a new file; values that it logs again, from an earlier
step on, supersede the earlier ones.
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "watch-tensorboard",
        help="report TensorBoard logs",
        description="Follows TensorBoard's event files as they grow and reports their scalars to EvalStop. Needs "
        "neither TensorFlow nor TensorBoard, and changes nothing in the folder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder with event files, at any depth")
    add("--name", help="prefix of the runs' names (default: the folder's name)")
    add("--one-run", action="store_true", help="report all folders below as one run, with the path before the tag")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="TAG=ROLE[:DIRECTION]",
        help="the role of a tag: eval, proxy, kl or loss; maximize or minimize (default: recognized by the tags)",
    )
    add(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="labels of the runs, in addition to $EVALSTOP_LABELS",
    )
    add("--total-steps", type=int, metavar="N", help="the planned length of the runs: with it, decisions come sooner")
    add("--policy", metavar="NAME[@VERSION]", help="policy of the runs (default: the project's)")
    add("--mode", choices=MODES, help="whether stops are carried out (default: the project's)")
    add("--once", action="store_true", help="send existing data, report the runs as completed, and exit")
    add_seconds(parser, "--poll-seconds", 5.0, "between polls")
    add("--state", type=Path, metavar="FILE", help="file with its position (default: in the user's state folder)")
    add_url_options(parser, "ingest")
    parser.set_defaults(run=watch_tensorboard)


def watch_tensorboard(options: argparse.Namespace) -> int:
    """Follow the folder until SIGTERM or Ctrl-C, or once."""
    root: Path = options.folder
    if not root.is_dir():
        raise ConfigurationError(f"folder {str(root)!r}: there is no such folder.")
    labels = {name: values[-1] for name, values in parse_pairs(options.label, "label").items()}
    opening = {
        "metrics": _parse_roles(options.metric) or AUTO,
        # The process receiver adds its label there for jobs that start this command beside their trainer.
        "labels": {**parse_labels(os.environ.get("EVALSTOP_LABELS", "")), **labels},
        **({"total_steps": options.total_steps} if options.total_steps else {}),
        **({"policy": options.policy} if options.policy else {}),
        **({"mode": options.mode} if options.mode else {}),
    }
    url, key = require_service(options)
    name = options.name or root.resolve().name or "tensorboard"
    digest = hashlib.sha256(f"{url}\n{name}\n{root.resolve()}".encode(errors="replace")).hexdigest()[:12]
    memory = options.state or choose_state_folder(None, "tensorboard") / f"{digest}.json"
    watch = Watch(root, Service(url, key), name, opening, memory, options.one_run)
    return _follow_folder(watch, ShutdownSignal(), options.poll_seconds, options.once)


def _follow_folder(watch: Watch, ending: ShutdownSignal, poll_seconds: float, once: bool) -> int:
    failures = 0
    while not ending.is_set:
        try:
            watch.look()
            if once:
                watch.finish()
                return 0
        except (ServiceAway, KeyRefused) as error:
            if once and isinstance(error, KeyRefused):
                raise
            failures += 1
            if failures == 1:
                logger.warning("nothing is sent for now, retrying: %s", error)
            ending.wait(wait_seconds(failures, random.random()))
            continue
        if failures:
            logger.info("the service accepts data again")
        failures = 0
        ending.wait(max(0.1, poll_seconds))
    return 0


def _parse_roles(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    roles: dict[str, dict[str, str]] = {}
    for text in texts:
        tag, _, role = text.rpartition("=")  # a tag may contain `=`, a role does not
        metric_role, _, direction = role.partition(":")
        if not tag or metric_role not in METRIC_ROLES or direction not in ("", *DIRECTIONS):
            raise ConfigurationError(
                f"metric {text!r}: write TAG=ROLE or TAG=ROLE:minimize; {', '.join(METRIC_ROLES)}."
            )
        roles[tag] = {"role": metric_role, **({"direction": direction} if direction else {})}
    return roles

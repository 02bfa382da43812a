"""`evalstop-receiver watch-tensorboard`: reports new data in a folder of TensorBoard runs, and saves its position.

The position advances only once the service has the data: a watcher that is killed sends some of it again, which counts
once. It reports only what is in the trainer's files: no heartbeats, and no end of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evalstop_client.config import fit_line
from evalstop_client.errors import ConfigurationError, KeyRefused, ServiceAway
from evalstop_client.job_identity import LONGEST_IDENTITY
from evalstop_client.latest_answer import ENDED
from evalstop_client.metric_roles import AUTO
from evalstop_client.observations import encode_value, format_time
from evalstop_client.receivers.stop.processes import exit_on_signals
from evalstop_client.receivers.stop.receiver import (
    add_seconds,
    add_url_options,
    choose_state_folder,
    parse_service,
)
from evalstop_client.service import Accepted, Answer, Json, Refused, Service, Unauthorized, wait_seconds
from evalstop_client.settings import MODES, parse_labels, parse_pairs
from evalstop_client.spool.segment import merge_observations, split_rejected
from evalstop_client.tensorboard import Folder, Portion, Scalar, find_event_files

logger = logging.getLogger("evalstop_client.tensorboard")

LONGEST_TAG = 256


class Watch:
    """One root folder of runs. `opening` is the body that opens every run, without its name.

    With `one_run` the folders below are parts of one run: their path precedes the tag.
    """

    def __init__(
        self, root: Path, service: Service, name: str, opening: Mapping[str, Any], memory: Path, one_run: bool = False
    ) -> None:
        self._root = root
        self._service = service
        self._name = name
        self._opening = opening
        self._memory = memory
        self._one_run = one_run
        self._folders = self._load_positions()
        self._ids: dict[str, str] = {}
        self._logged: set[str] = set()

    def look(self) -> None:
        """Send new data. Raises ServiceAway and KeyRefused; nothing is lost, and everything can be retried."""
        for path, files in find_event_files(self._root):
            self._send_folder(path.relative_to(self._root).as_posix(), files)

    def finish(self) -> None:
        """Report every run with sent data as completed. Raises ServiceAway and KeyRefused."""
        for run in sorted(self._ids):
            self._post_entry(run, "finish", {"status": "completed"})

    def _send_folder(self, inside: str, files: Sequence[Path]) -> None:
        """Send a folder's new data in order; none while the service refuses to open its run."""
        folder = self._folders.setdefault(inside, Folder())
        for file in files:
            while (portion := folder.portion(file)) is not None:
                if not self._send_portion(inside, portion):
                    return
                folder.take(file, portion)
                self._save_positions()

    def _send_portion(self, inside: str, portion: Portion) -> bool:
        """Send a portion; false if the service refuses to open its run."""
        below = "" if inside == "." else inside
        run = self._name if self._one_run or not below else f"{self._name}/{below}"
        before = f"{below}/" if self._one_run and below else ""
        points = [point for scalar in portion.scalars if (point := self._to_observation(before, scalar)) is not None]
        if not points:
            return True
        if not self._ensure_open(run):
            return False
        if portion.restarts_at is not None:
            self._post_entry(run, "resume", {"step": max(0, portion.restarts_at - 1)})
        waiting = [merge_observations(points)]
        while waiting:
            part = waiting.pop()
            refused = self._post_entry(run, part.to, dict(part.body))
            if refused is not None:
                bad, valid = split_rejected(part, refused)
                if bad is not None:
                    self._log_once("refused", f"the service refuses some data of {run}: {refused.reason}")
                waiting.extend(reversed(valid))
        return True

    def _ensure_open(self, run: str) -> bool:
        """Open the run, unless it is open; false if the service refuses it."""
        if run not in self._ids:
            opened = self._open_run(run)
            if isinstance(opened, Refused):
                self._log_once(f"open {run}", f"{run} is NOT being watched: {opened.reason}")
                return False
            self._ids[run] = str(opened.body.get("id"))
        return True

    def _post_entry(self, run: str, to: str, body: Json) -> Refused | None:
        """Post to an open run; returns a refusal."""
        answer = self._check_answer(self._service.post(f"/runs/{self._ids[run]}/{to}", body))
        if isinstance(answer, Refused) and answer.status == 404:
            del self._ids[run]  # the service does not know it: reopen it at the next poll
            raise ServiceAway(answer.reason)
        return answer if isinstance(answer, Refused) else None

    def _open_run(self, run: str) -> Accepted | Refused:
        """Open the run of a folder: always the same one, even if it was reported as ended."""
        identity = f"tensorboard:{socket.gethostname()}:{self._root.resolve()}"[:LONGEST_IDENTITY]
        opening = {**self._opening, "name": fit_line(run), "job": identity}
        once = {"opening": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{identity}\n{run}"))}
        opened = self._check_answer(self._service.post("/runs", opening | once))
        if isinstance(opened, Accepted) and opened.body.get("status") in ENDED:
            return self._check_answer(self._service.post("/runs", opening | {"resume": "must"}))
        return opened

    def _check_answer(self, answer: Answer) -> Accepted | Refused:
        if isinstance(answer, Accepted | Refused):
            return answer
        raise KeyRefused(answer.reason) if isinstance(answer, Unauthorized) else ServiceAway(answer.reason)

    def _to_observation(self, before: str, scalar: Scalar) -> Json | None:
        metric = before + scalar.tag
        if scalar.step < 0 or len(metric) > LONGEST_TAG:
            self._log_once(
                "odd",
                f"{metric!r:.80} at step {scalar.step} is skipped: invalid step, or a tag longer than {LONGEST_TAG}",
            )
            return None
        point: Json = {"metric": metric, "step": scalar.step, "value": encode_value(scalar.value)}
        try:
            return point | {"time": format_time(datetime.fromtimestamp(scalar.wall_time, UTC))}
        except (OverflowError, ValueError, OSError):
            return point

    def _load_positions(self) -> dict[str, Folder]:
        try:
            document = json.loads(self._memory.read_text())
            return {str(path): Folder.from_document(folder) for path, folder in document["folders"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            logger.warning("%s cannot be read, everything is sent again: %s", self._memory, error)
            return {}

    def _save_positions(self) -> None:
        document = {"version": 1, "folders": {path: folder.document() for path, folder in self._folders.items()}}
        draft = self._memory.with_suffix(".draft")
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft.write_text(json.dumps(document))
            draft.replace(self._memory)
        except OSError as error:
            self._log_once("memory", f"{self._memory} cannot be written, a restart will send everything again: {error}")

    def _log_once(self, kind: str, message: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s (logged once)", message)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder with event files, at any depth")
    add("--name", help="prefix of the runs' names (default: the folder's name)")
    add("--one-run", action="store_true", help="report all folders below as one run, with the path before the tag")
    add(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="labels of the runs, in addition to $EVALSTOP_LABELS; evalstop.eval=TAG:minimize or TAG:maximize "
        "declares the eval (default: recognized by the tags)",
    )
    add("--total-steps", type=int, metavar="N", help="the planned length of the runs: with it, decisions come sooner")
    add("--policy", metavar="NAME[@VERSION]", help="policy of the runs (default: the project's)")
    add("--mode", choices=MODES, help="whether stops are carried out (default: the project's)")
    add("--once", action="store_true", help="send existing data, report the runs as completed, and exit")
    add_seconds(parser, "--poll-seconds", 5.0, "between polls")
    add("--state", type=Path, metavar="FILE", help="file with its position (default: in the user's state folder)")
    add_url_options(parser, "ingest")


def run(options: argparse.Namespace) -> int:
    """Follow the folder until SIGTERM or Ctrl-C, or once."""
    root: Path = options.folder
    if not root.is_dir():
        raise ConfigurationError(f"folder {str(root)!r}: there is no such folder.")
    opening = {
        "metrics": AUTO,
        # The process receiver adds its label there for jobs that start this command beside their trainer.
        "labels": parse_labels(os.environ.get("EVALSTOP_LABELS", "")) | dict(parse_pairs(options.label, "label")),
        **({"total_steps": options.total_steps} if options.total_steps else {}),
        **({"policy": options.policy} if options.policy else {}),
        **({"mode": options.mode} if options.mode else {}),
    }
    url, key = parse_service(options)
    name = options.name or root.resolve().name or "tensorboard"
    digest = hashlib.sha256(f"{url}\n{name}\n{root.resolve()}".encode(errors="replace")).hexdigest()[:12]
    memory = options.state or choose_state_folder(None, "tensorboard") / f"{digest}.json"
    watch = Watch(root, Service(url, key), name, opening, memory, options.one_run)
    exit_on_signals()  # what is not yet in its memory is sent again
    return _follow_folder(watch, options.poll_seconds, options.once)


def _follow_folder(watch: Watch, poll_seconds: float, once: bool) -> int:
    failures = 0
    while True:
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
            time.sleep(wait_seconds(failures, random.random()))
            continue
        if failures:
            logger.info("the service accepts data again")
        failures = 0
        time.sleep(max(0.1, poll_seconds))

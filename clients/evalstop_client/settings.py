"""Settings of a run, from arguments or the environment, checked once."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

from evalstop_client.config import (
    LabelValue,
    fit_line,
    flatten_config,
    format_value,
    replace_controls,
)
from evalstop_client.errors import ConfigurationError
from evalstop_client.job_identity import identify_job, name_process, scheduler_labels
from evalstop_client.latest_answer import Decision, Exploit
from evalstop_client.metric_roles import Metrics, check_metrics

MODES = ("shadow", "enforce")
RESUMES = ("must", "allow")

LONGEST_WAIT_SECONDS = 366 * 86_400.0
"""No thread can wait for infinity; a longer wait has the same effect as this one."""

MOST_TAGS, LONGEST_TAG, LONGEST_NOTES = 50, 100, 20_000
"""What the service takes of them when a run is opened."""

LONGEST_PLAN = 2**53 - 1
"""The service takes no longer length; trainers write one for a run without an end, such as sys.maxsize."""


@dataclass(frozen=True)
class Limits:
    """The limits of the reporter.

    - `flush_seconds`: longest wait for the service in `finish`, at the end of the `with` block and at exit; while the
      service accepts data, up to six times as long. A disk that hangs takes up to 5 seconds more.
    - `poll_seconds`: time between heartbeats of an idle run, which also return whether it should stop.
    - `timeout_seconds`: of each step of one request.
    - `queue_entries`: calls held in memory until they are on disk.
    - `spool_bytes`: on disk, per run name; beyond it observations are dropped.
    - `segment_bytes`: of one spool file, which is deleted once all of it is sent.
    - `batch_observations`: observations sent in one request.
    - `unauthorized_seconds`: time between retries while the key is not accepted.
    """

    flush_seconds: float = 10.0
    poll_seconds: float = 30.0
    timeout_seconds: float = 10.0
    queue_entries: int = 10_000
    spool_bytes: int = 256 * 2**20
    segment_bytes: int = 8 * 2**20
    batch_observations: int = 1_000
    unauthorized_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            most = LONGEST_WAIT_SECONDS if name.endswith("_seconds") else math.inf
            is_usable = isinstance(limit, Real) and 0 <= float(limit) <= most
            if not is_usable or (limit == 0 and name != "flush_seconds"):
                raise ConfigurationError(f"{name} {limit!r}: it must be above 0, and a time at most a year.")


class RunArguments(TypedDict, total=False):
    """The arguments of `Run`, which describes them, but for its name."""

    url: str | None
    key: str | None
    metrics: Metrics | None
    labels: Mapping[str, LabelValue] | None
    config: object
    owner: str | None
    group: str | None
    population: Mapping[str, Any] | None
    tags: Sequence[str]
    notes: str | None
    policy: str | None
    mode: Literal["shadow", "enforce"] | None
    total_steps: int | None
    evaluates: bool | float
    resume: Literal["must", "allow"] | None
    on_stop: Callable[[Decision], object] | None
    on_exploit: Callable[[Exploit], object] | None
    spool_folder: str | Path | None
    limits: Limits | None


@dataclass(frozen=True)
class Settings:
    """Where a run reports, how it is opened, and its limits; `url` None means nowhere."""

    url: str | None
    key: str | None = field(repr=False)
    opening: Mapping[str, Any]  # the body of POST /runs
    spool_folder: Path  # for this run name only
    limits: Limits


def validate_url(url: str) -> str:
    """Return the url of the service, also if that of its API is given; raises ConfigurationError if it is unusable.

    >>> validate_url("https://evalstop.example/api/v1/")
    'https://evalstop.example'
    """
    try:
        parsed = urlsplit(url.strip())
        usable = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
        usable = usable and url.strip().isprintable() and " " not in url.strip()
    except (ValueError, AttributeError, TypeError):
        usable = False
    if not usable:
        raise ConfigurationError(f"url {url!r}: write it like http://127.0.0.1:8787, in url= or EVALSTOP_URL.")
    return url.strip().rstrip("/").removesuffix("/api/v1").rstrip("/")


def validate_key(key: str | None) -> str | None:
    """Return the key without surrounding whitespace, as from files; None if it is empty."""
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError("key: it has a space or a character that no key has; copy it again (EVALSTOP_KEY).")
    return key or None


def parse_pairs(texts: Iterable[str], where: str) -> list[tuple[str, str]]:
    """Parse texts of the form NAME=VALUE, from the option or variable `where`; raises ConfigurationError."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(f"{where} {text!r}: write NAME=VALUE.")
        pairs.append((name.strip(), value.strip()))
    return pairs


def parse_labels(text: str) -> dict[str, str]:
    """Parse labels in the form `k=v,k2=v2` of EVALSTOP_LABELS."""
    return dict(parse_pairs((part for part in text.split(",") if part.strip()), "EVALSTOP_LABELS"))


def resolve(environment: Mapping[str, str], name: str | None, arguments: RunArguments) -> Settings:
    """The settings of a run, from arguments, else from `environment`; raises ConfigurationError."""
    if unknown := arguments.keys() - RunArguments.__annotations__.keys():
        raise TypeError(f"Run() has no argument {unknown.pop()!r}")
    url = arguments.get("url") or environment.get("EVALSTOP_URL", "").strip() or None
    url = validate_url(url) if url is not None else None
    name = name or environment.get("EVALSTOP_RUN_NAME") or ("" if url else "unnamed")
    if not name or not isinstance(name, str):
        raise ConfigurationError("name: set a name with name= or EVALSTOP_RUN_NAME.")
    name = fit_line(name)
    opening = _describe_run(arguments)
    labels = arguments.get("labels") or {}
    merged = scheduler_labels(environment) | parse_labels(environment.get("EVALSTOP_LABELS", "")) | dict(labels)
    if "receiver" in merged:
        merged["process_id"] = name_process(environment)
    if merged:
        opening["labels"] = {str(label): format_value(value) for label, value in merged.items()}
    # The id lets the service recognize a repeated opening: another process may send it from the spool days later.
    opening |= {"name": name, "job": identify_job(environment), "opening": str(uuid.uuid4())}
    key = validate_key(arguments.get("key") or environment.get("EVALSTOP_KEY"))
    if key is not None:  # that process may have another key, and the data belongs to the project of this one
        opening["key_hash"] = hashlib.sha256(key.encode()).hexdigest()
    folder = choose_spool_folder(arguments.get("spool_folder"), environment, url, name)
    return Settings(url, key, opening, folder, arguments.get("limits") or Limits())


def _describe_run(arguments: RunArguments) -> dict[str, Any]:
    """The arguments as fields of the body that opens a run: omitted ones stay omitted, which leaves them unchanged."""
    mode, resume, evaluates = arguments.get("mode"), arguments.get("resume"), arguments.get("evaluates", False)
    metrics, policy, total_steps = arguments.get("metrics"), arguments.get("policy"), arguments.get("total_steps")
    given = arguments.get("tags", ())
    tags = [given] if isinstance(given, str) else list(given)
    if mode is not None and mode not in MODES:
        raise ConfigurationError(f"mode {mode!r}: choose one of {', '.join(MODES)}, or leave it to the project.")
    if resume is not None and resume not in RESUMES:
        raise ConfigurationError(f"resume {resume!r}: choose one of {', '.join(RESUMES)}, or leave it out.")
    if not isinstance(evaluates, int | float) or not 0 <= evaluates <= 1:
        raise ConfigurationError(f"evaluates {evaluates!r}: true, false, or the share of the run an eval takes.")
    opening = {
        "metrics": None if metrics is None else check_metrics(metrics),
        "params": flatten_config(arguments.get("config")) or None,
        "policy": None if policy is None else str(policy),
        "mode": mode,
        "total_steps": None if total_steps is None else _check_total_steps(total_steps),
        "eval_share": None if evaluates is False else 0.0 if evaluates is True else float(evaluates),
        "resume": resume,
        # A run is watched whatever these are: only as much of them is sent as the service takes.
        "owner": fit_line(format_value(arguments.get("owner") or "")) or None,
        "group": fit_line(format_value(arguments.get("group") or "")) or None,
        "population": _check_population(arguments.get("population"), arguments.get("group")),
        "tags": [fit_line(format_value(tag), LONGEST_TAG) for tag in tags[:MOST_TAGS]] or None,
        "notes": replace_controls(format_value(arguments.get("notes") or "")[:LONGEST_NOTES], keeping="\n\t") or None,
    }
    return {name: value for name, value in opening.items() if value is not None}


def _check_population(population: Mapping[str, Any] | None, group: str | None) -> dict[str, Any] | None:
    if population is None:
        return None
    if not group:
        raise ConfigurationError("population: it is the rule of a group; name the group with group=.")
    try:
        return dict(json.loads(json.dumps(population, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"population {population!r:.200}: write it as docs/sweeps.md says: {error}.") from None


def choose_spool_folder(root: str | Path | None, environment: Mapping[str, str], url: str | None, name: str) -> Path:
    """The folder with unsent data of one run name for one service.

    `root` defaults to EVALSTOP_SPOOL, else the user's state folder, else the temporary folder.
    """
    chosen = root or environment.get("EVALSTOP_SPOOL")
    if chosen:
        folder = Path(os.path.expanduser(chosen))  # noqa: PTH111  # Path.expanduser raises for a user without a home
    elif (state := find_state_folder(environment)) is not None and _is_writable(state):
        folder = state / "spool"
    else:
        temporary = environment.get("TMPDIR", "/tmp")  # noqa: S108  # others cannot write to this user's folder
        folder = Path(temporary) / f"evalstop-spool-{os.getuid()}"
    legible = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:60]
    digest = hashlib.sha256(f"{url}\n{name}".encode(errors="replace")).hexdigest()[:12]
    return folder.absolute() / f"{legible}-{digest}"  # the trainer may change its working folder


def _is_writable(folder: Path) -> bool:
    """Whether a folder, or the next one above it that exists, can be written to."""
    return os.access(next(place for place in (folder, *folder.parents) if place.exists()), os.W_OK)


def find_state_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for what EvalStop keeps; None without XDG_STATE_HOME and a home."""
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "evalstop"
    try:
        home = Path.home()
    except RuntimeError:  # a container's user need not have one
        return None
    return home / ".local" / "state" / "evalstop"


def _check_total_steps(total_steps: int) -> int | None:
    """The planned length; None if it is one that the service does not take."""
    try:
        steps = operator.index(total_steps)
    except TypeError:
        steps = 0
    if steps < 1:
        raise ConfigurationError(f"total_steps {total_steps!r}: it must be a whole number above 0, or left out.")
    return steps if steps <= LONGEST_PLAN else None

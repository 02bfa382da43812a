"""Evaluates checkpoints with Kubernetes Jobs, one per checkpoint, created from the operator's manifest.

A Job is named after its request, and nothing else is stored: a restarted evaluator finds the Jobs that it created, and
two evaluators of one project share them. The scores are read from the pod's log, so the pod needs no key of the
service.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalstop_client.errors import ConfigurationError
from evalstop_client.eval_request import Difference, Scores, compare_scores
from evalstop_client.receivers.evaluation import (
    MAX_OUTPUT_BYTES,
    EvaluationFailed,
    PairedRequest,
    check_places,
    check_uri,
    fill_places,
    read_logged_scores,
)
from evalstop_client.receivers.kubernetes.access import read_yaml
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import JOB, POD, Object, at

logger = logging.getLogger("evalstop_client.receivers")

REQUEST_ID = re.compile(r"[0-9a-f-]{1,40}")
BACKOFF_LIMIT = 2  # three attempts, as for a command
KEPT_SECONDS = 86_400  # longer than a request is open, so that a failed Job is not created again


@dataclass(frozen=True)
class JobManifest:
    """A Job with placeholders in the command, arguments and variables of its containers."""

    job: Object

    def fill(self, name: str, request: PairedRequest, uri: str) -> dict[str, Any]:
        """The Job that evaluates a checkpoint."""
        job: dict[str, Any] = copy.deepcopy(dict(self.job))
        values = (uri.replace("$", "$$"), str(request.prompts), str(request.seed))  # Kubernetes expands $(NAME)
        for container in _containers(job):
            for part in ("command", "args"):
                if part in container:
                    container[part] = [fill_places(argument, values) for argument in container[part]]
            for variable in container.get("env", []):
                if "value" in variable:
                    variable["value"] = fill_places(variable["value"], values)
        metadata = job.setdefault("metadata", {})
        metadata["name"] = name
        metadata["labels"] = {**metadata.get("labels", {}), "evalstop.io/run": request.run_id}
        metadata["annotations"] = {**metadata.get("annotations", {}), "evalstop.io/checkpoint": uri}
        return job


class JobEvaluation:
    """Creates both Jobs of a request, and reads their pods' logs once both are complete."""

    tries = 1  # the Job itself retries, by its backoffLimit

    def __init__(self, api: Api, namespace: str, manifest: JobManifest, prefixes: Sequence[str]) -> None:
        self._api = api
        self._namespace = namespace
        self._manifest = manifest
        self._prefixes = prefixes

    def compare(self, request: PairedRequest) -> Difference | None:
        """The difference of both Jobs' scores; None until both are complete."""
        if not REQUEST_ID.fullmatch(request.id):
            raise EvaluationFailed(f"{request.id[:80]!r} is not the id of a request")
        uris = {"best": request.best_uri, "current": request.current_uri}
        for uri in uris.values():
            check_uri(uri, self._prefixes)
        jobs = [self._find_or_create(f"evalstop-{request.id}-{name}", request, uri) for name, uri in uris.items()]
        for job in jobs:
            _check_not_failed(job)
        if not all("Complete" in JOB.list_states(job) for job in jobs):
            return None
        best, current = (self._read_scores(job) for job in jobs)
        return compare_scores(best, current)

    def _find_or_create(self, name: str, request: PairedRequest, uri: str) -> Object:
        existing = self._api.get(JOB, self._namespace, name)
        if existing is not None:
            return existing
        job = self._manifest.fill(name, request, uri)
        if self._api.create(JOB, self._namespace, job):
            logger.info("created Job %s/%s to evaluate %s", self._namespace, name, uri)
        return job  # after a conflict: another evaluator created it

    def _read_scores(self, job: Object) -> Scores:
        """The log of the pod that succeeded: of several attempts there is only one."""
        name, container = job["metadata"]["name"], next(_containers(job))["name"]
        listed_pods = self._api.list(POD, self._namespace, JOB.selector(job)).items
        pods = [pod["metadata"]["name"] for pod in listed_pods if at(pod, "status", "phase") == "Succeeded"]
        log = self._api.read_log(self._namespace, pods[0], container, MAX_OUTPUT_BYTES + 1) if pods else None
        if log is None:
            raise EvaluationFailed(f"Job {self._namespace}/{name} is complete, and its pod is gone with its log")
        try:
            return read_logged_scores(log)
        except EvaluationFailed as error:
            raise EvaluationFailed(f"pod {self._namespace}/{pods[0]}: {error.detail}") from None


def load_job_manifest(file: Path, timeout_seconds: float) -> tuple[JobManifest, str | None]:
    """A manifest with defaults filled in, and its namespace; raises ConfigurationError."""
    try:
        job = read_yaml(file)
        if (job["apiVersion"], job["kind"]) != ("batch/v1", "Job"):
            raise ConfigurationError(f"{file}: it is not a batch/v1 Job.")
        metadata, spec = job.setdefault("metadata", {}), job["spec"]
        if any(spec.get(name, 1) != 1 for name in ("completions", "parallelism")):
            raise ConfigurationError(f"{file}: completions and parallelism must be 1: one pod prints the scores.")
        for name in ("name", "generateName"):
            metadata.pop(name, None)
        spec.setdefault("backoffLimit", BACKOFF_LIMIT)
        spec.setdefault("activeDeadlineSeconds", max(1, round(timeout_seconds)))
        spec.setdefault("ttlSecondsAfterFinished", KEPT_SECONDS)
        spec["template"]["spec"].setdefault("restartPolicy", "Never")
        check_places(f"{file}", [text for container in _containers(job) for text in _texts(container)])
        return JobManifest(job), metadata.pop("namespace", None)
    except OSError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{file}: it is not a usable Job: {error!r}") from None


def _containers(job: Object) -> Iterator[dict[str, Any]]:
    """Its containers, beginning with the one that prints the scores, and its init containers."""
    pod = job["spec"]["template"]["spec"]
    yield from pod["containers"]
    yield from pod.get("initContainers", [])


def _texts(container: Mapping[str, Any]) -> Iterator[str]:
    yield from container.get("command", [])
    yield from container.get("args", [])
    yield from (variable["value"] for variable in container.get("env", []) if "value" in variable)


def _check_not_failed(job: Object) -> None:
    for condition in at(job, "status", "conditions") or []:
        if condition.get("type") == "Failed" and condition.get("status") == "True":
            message = ": ".join(condition[name] for name in ("reason", "message") if condition.get(name))
            raise EvaluationFailed(f"Job {job['metadata']['namespace']}/{job['metadata']['name']} failed: {message}")

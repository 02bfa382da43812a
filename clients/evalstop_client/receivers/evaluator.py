"""`evalstop-receiver evaluator`: evaluates checkpoints on request, with a command or with Kubernetes Jobs.

It stores nothing: a request stays open until it is answered, so a restarted evaluator starts over, and of two
evaluators of one project the first answer stands.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from evalstop_client.errors import ConfigurationError, SchedulerError
from evalstop_client.eval_request import Difference
from evalstop_client.receivers.evaluation import CommandEvaluation, EvaluationFailed, PairedRequest, check_places
from evalstop_client.receivers.kubernetes.access import add_access_options, load_access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.evaluation import JobEvaluation, load_job_manifest
from evalstop_client.receivers.stop.options import add_seconds, add_url_options, require_service
from evalstop_client.receivers.stop.processes import copy_environment
from evalstop_client.service import Accepted, Json, Refused, Service, seconds_after

Evaluation = CommandEvaluation | JobEvaluation

logger = logging.getLogger("evalstop_client.receivers")

MOST_REQUESTS = 200
"""Maximum number of requests that the service returns."""


class Evaluator:
    """Polls the service every `poll_seconds` until `ended` is set; `prompts`: the number in a usual eval."""

    def __init__(
        self, service: Service, evaluation: Evaluation, prompts: int, poll_seconds: float, ended: threading.Event
    ) -> None:
        self._service = service
        self._evaluation = evaluation
        self._prompts = prompts
        self._poll_seconds = poll_seconds
        self._ended = ended
        self._failures: Counter[str] = Counter()
        self._delays: dict[str, str] = {}

    def run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            answer = self._service.get(f"/eval-requests?limit={MOST_REQUESTS}")
            if isinstance(answer, Accepted):
                failures = 0
                items = answer.body.get("items")
                for item in items if isinstance(items, list) else []:
                    if not self._ended.is_set():
                        self._process_request(item)
                self._ended.wait(self._poll_seconds)
                continue
            failures += 1
            if failures == 1:
                logger.warning("requests cannot be fetched, retrying: %s", answer.reason)
            self._ended.wait(seconds_after(answer, failures))

    def _process_request(self, item: Json) -> None:
        """Evaluate and report, unless there is no current checkpoint yet, or it failed too often."""
        try:
            if item["current_checkpoint"] is None:
                return
            request = PairedRequest(
                id=str(item["id"]),
                run_id=str(item["run_id"]),
                best_uri=str(item["best_checkpoint"]["uri"]),
                current_uri=str(item["current_checkpoint"]["uri"]),
                prompts=self._prompts * int(item["multiplier"]),
                seed=int(item["seed"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            logger.error("the service returned a malformed request: %s %s", type(error).__name__, error)
            return
        tries = self._evaluation.tries
        if self._failures[request.id] >= tries:
            return
        try:
            difference = self._evaluation.compare(request)
        except SchedulerError as error:
            if self._delays.get(request.id) != str(error):  # not at every poll
                logger.warning("request %s waits: %s", request.id, error)
            self._delays[request.id] = str(error)
            return
        except (EvaluationFailed, ValueError) as error:
            self._failures[request.id] += 1
            logger.error("request %s, try %d of %d: %s", request.id, self._failures[request.id], tries, error)
            return
        if difference is not None:
            self._report_difference(request, difference)

    def _report_difference(self, request: PairedRequest, difference: Difference) -> None:
        """Repeat the answer until the service has accepted or refused it."""
        path = f"/runs/{quote(request.run_id, safe='')}/eval-requests/{quote(request.id, safe='')}/answer"
        tries = 0
        while not self._ended.is_set():
            answer = self._service.post(path, difference._asdict())
            if isinstance(answer, Accepted):
                logger.info(
                    "request %s is answered: the difference is %g, its standard error %g",
                    request.id,
                    difference.difference,
                    difference.stderr,
                )
                return
            if isinstance(answer, Refused):
                logger.warning("the service does not accept the answer: %s", answer.reason)
                return
            tries += 1
            self._ended.wait(seconds_after(answer, tries))


EXAMPLES = """\
examples:
  # 800 prompts for a request for four times the usual 200, on this machine
  evalstop-receiver evaluator --prompts 200 --prefix file:///checkpoints/ -- python eval.py {checkpoint} {n} {seed}

  # the same as a Slurm job: its output is the answer
  evalstop-receiver evaluator --prompts 200 --prefix s3://runs/ -- srun --gpus 1 python eval.py {checkpoint} {n} {seed}

  # as Kubernetes Jobs; {checkpoint}, {n} and {seed} appear in the command, args or env of the Job's containers
  evalstop-receiver evaluator --prompts 200 --prefix s3://runs/ --kubernetes-job eval-job.yaml

The command runs for the best checkpoint and for the current one. It prints JSON lines: the score of each prompt, a
number or {"score": number}, in the same order both times; or one line {"mean": number, "stderr": number}. Only
checkpoints whose uri begins with a --prefix are evaluated: loading a checkpoint may run code in it.

A Job's first container prints the same to its log, as objects; other log lines are ignored. Both Jobs of a request run
concurrently, named evalstop-REQUEST-best and evalstop-REQUEST-current, so that a restarted evaluator continues with
them. A failed Job is not created again. Defaults for fields missing in the manifest: activeDeadlineSeconds from
--timeout-seconds, backoffLimit 2, ttlSecondsAfterFinished 86400, restartPolicy Never. The evaluator needs the verbs
get and create on jobs, list on pods and get on pods/log, in the manifest's namespace (default: its own).
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "evaluator",
        help="evaluate checkpoints on request",
        description="Evaluates the best and the current checkpoint of a run with your own command, or with Kubernetes "
        "Jobs, when EvalStop requests it, and reports the difference.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--prompts",
        type=int,
        required=True,
        metavar="N",
        help="number in a usual eval; a request asks for a multiple of it",
    )
    add("--prefix", action="append", required=True, metavar="URI", help="prefix of checkpoint URIs that may be loaded")
    add_seconds(parser, "--timeout-seconds", 3600.0, "timeout of each evaluation")
    add_seconds(parser, "--poll-seconds", 10.0, "between two polls")
    add_url_options(parser, "report")
    add("command", nargs="*", metavar="COMMAND", help="command with {checkpoint}, {n} and {seed} in its arguments")
    cluster = parser.add_argument_group("Kubernetes")
    cluster.add_argument(
        "--kubernetes-job",
        type=Path,
        metavar="FILE",
        help="manifest of a Job, instead of a command, with {checkpoint}, {n} and {seed} in its containers",
    )
    add_access_options(cluster)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer requests until SIGTERM or SIGINT."""
    url, key = require_service(options)
    if options.prompts < 1:
        raise ConfigurationError(f"--prompts {options.prompts}: it must be positive.")
    ended = threading.Event()
    evaluation = _create_evaluation(options, ended)
    evaluator = Evaluator(Service(url, key), evaluation, options.prompts, max(0.05, options.poll_seconds), ended)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    evaluator.run()
    return 0


def _create_evaluation(options: argparse.Namespace, ended: threading.Event) -> Evaluation:
    environment = copy_environment(options.key_env)
    if (options.kubernetes_job is None) == (not options.command):
        raise ConfigurationError("command: give a command after --, or --kubernetes-job.")
    if options.kubernetes_job is None:
        check_places("command", options.command[1:])
        return CommandEvaluation(options.command, environment, options.prefix, options.timeout_seconds, ended)
    manifest, namespace = load_job_manifest(options.kubernetes_job, options.timeout_seconds)
    access = load_access(options, environment)
    return JobEvaluation(Api(access), namespace or access.namespace, manifest, options.prefix)

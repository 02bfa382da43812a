"""`evalstop-receiver evaluator`: evaluates checkpoints on request, with a command or with Kubernetes Jobs."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.evaluator.evaluation import CommandEvaluation, check_places
from evalstop_client.receivers.evaluator.evaluator import Evaluation, Evaluator
from evalstop_client.receivers.evaluator.kubernetes_job import JobEvaluation, load_job_manifest
from evalstop_client.receivers.kubernetes.access import add_access_options, load_access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.stop.options import add_seconds, add_url_options, require_service
from evalstop_client.receivers.stop.processes import copy_environment
from evalstop_client.service import Service

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

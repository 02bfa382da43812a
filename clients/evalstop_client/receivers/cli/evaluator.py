"""`evalstop-receiver evaluator`: evaluates checkpoints by a command when a suspicion asks for it."""

from __future__ import annotations

import argparse
import os
import signal

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.evaluator.evaluation import PLACES
from evalstop_client.receivers.evaluator.evaluator import Evaluation, Evaluator
from evalstop_client.receivers.stop.options import parse_service, seconds
from evalstop_client.receivers.stop.subprocesses import environment_without
from evalstop_client.service import Service

EXAMPLES = """\
examples:
  # 800 prompts for a request of four times the usual 200, on this machine
  evalstop-receiver evaluator --prompts 200 --prefix file:///checkpoints/ -- python eval.py {checkpoint} {n} {seed}

  # the same as a job of Slurm: what the job prints is the answer
  evalstop-receiver evaluator --prompts 200 --prefix s3://runs/ -- srun --gpus 1 python eval.py {checkpoint} {n} {seed}

The command is run for the best checkpoint and for the current one. It prints JSON lines: the score of each prompt, a
number or {"score": number}, in the same order both times; or one line {"mean": number, "stderr": number}. Only
checkpoints whose uri begins with a --prefix are evaluated: to load one may be to run code that is in it.
"""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `evaluator` to the command line."""
    parser = kinds.add_parser(
        "evaluator",
        help="evaluate checkpoints when a suspicion asks for it",
        description="Has the best checkpoint and the current one of a run evaluated by your own command when EvalStop "
        "asks for it, and reports the difference.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--prompts",
        type=int,
        required=True,
        metavar="N",
        help="of a usual eval; a request asks for several times as many",
    )
    add("--prefix", action="append", required=True, metavar="URI", help="how checkpoints begin that may be loaded")
    add("--timeout-seconds", type=seconds, default=3600.0, metavar="S", help="for each evaluation (default: 3600)")
    add("--poll-seconds", type=seconds, default=10.0, metavar="S", help="between two looks (default: 10)")
    add("--url", default=os.environ.get("EVALSTOP_URL"), help="the service (default: $EVALSTOP_URL)")
    add("--key-env", default="EVALSTOP_KEY", metavar="NAME", help="variable with a key of scope report (EVALSTOP_KEY)")
    add("command", nargs="+", metavar="COMMAND", help="with {checkpoint}, {n} and {seed} in its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer requests until SIGTERM or SIGINT."""
    url, key = parse_service(options)
    if url is None:
        raise ConfigurationError("url: name the service with --url or EVALSTOP_URL.")
    if options.prompts < 1:
        raise ConfigurationError(f"--prompts {options.prompts}: it must be above 0.")
    missing = [place for place in PLACES if not any(place in argument for argument in options.command[1:])]
    if missing:
        raise ConfigurationError(f"command: {' and '.join(missing)} is missing; write them as arguments.")
    environment = environment_without(options.key_env)
    evaluation = Evaluation(options.command, environment, options.prompts, options.prefix, options.timeout_seconds)
    evaluator = Evaluator(Service(url, key), evaluation, max(0.05, options.poll_seconds))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: evaluator.end())
    evaluator.run()
    return 0

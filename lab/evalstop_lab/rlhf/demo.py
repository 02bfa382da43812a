"""`evalstop-lab demo`: a real training run over-optimizes, and EvalStop stops it and keeps the best checkpoint."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.report import format_percent
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.rlhf.trainer import PRESETS, Eval
from evalstop_lab.service_process import run_trainer, running_service, wait_until

EXAMPLES = """examples:
  evalstop-lab demo                        a run that over-optimizes and is stopped
  evalstop-lab demo --preset healthy       a run that stays healthy and completes
"""

SEEN_SECONDS = 5.0
"""How long to wait for the service to process an eval before its row is printed."""

CONFIRM_SECONDS = 30.0
"""How long to wait for a confirmed stop after the end of the job."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--preset", choices=sorted(PRESETS), default="overoptimizes", help="the run to train")
    parser.add_argument("--seed", type=whole_number, default=0, help="random seed (default: 0)")
    parser.add_argument("--policy", default="default", help="policy of the run; paper stops it after 3 declines")
    parser.add_argument("--hasten", type=positive_number, default=1, help="divide the number of steps by this factor")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: a new folder in .evalstop/)")


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab demo`; return 0 if the run that over-optimizes was stopped, or the healthy one completed."""
    console = Console(highlight=False)
    if args.folder is None:
        Path(".evalstop").mkdir(exist_ok=True)
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="demo-", dir=".evalstop"))).resolve()
    with running_service(folder / "service") as service, service.connect() as api:
        settings = {"default_mode": "enforce", "max_mode": "enforce", "held_out_share": 0}
        api.patch("/project", json=settings).raise_for_status()
        console.print("The demo carries out every stop; by default a tenth is held out to measure the precision.")
        console.print(f"EvalStop is running; open {service.sign_in} to watch the run in a browser.", soft_wrap=True)
        trainer = ["-m", "evalstop_lab.cli", "train", "--json", "--stop-by", "signal", "--policy", args.policy]
        trainer += ["--preset", args.preset, "--seed", str(args.seed), "--hasten", str(args.hasten)]
        trainer += ["--checkpoints", str(folder / "checkpoints")]
        with run_trainer(service, folder, trainer) as job:
            evals = list(_follow_evals(api, job, console))
            job.wait()
        ended = _wait_for_end(api)
    stopped = _print_end(console, ended, evals, folder)
    if stopped:
        stopped_at, later_evals = continue_training(folder, console)
        final = later_evals[-1] if later_evals else evals[-1]
        console.print(
            f"  otherwise   eval {final.gold:.2f} ± {final.gold_stderr:.2f} at step {ended['total_steps']}, measured by"
            " training the same seed to its planned end"
        )
        console.print(f"  saved       {format_percent(1 - stopped_at / ended['total_steps'], 0)} of the steps")
    return 0 if stopped == (args.preset == "overoptimizes") else 1


def _follow_evals(api: httpx.Client, job: subprocess.Popen[str], console: Console) -> Iterator[Eval]:
    """Yield the evals that the trainer prints, after printing each with the service's verdict."""
    assert job.stdout is not None
    console.print(f"\n[bold]{'step':>7}  {'proxy':>7}  {'eval':>15}  {'KL':>6}  verdict[/bold]")
    for line in job.stdout:
        event = json.loads(line)
        if event.pop("event") != "eval":
            continue
        logged = Eval(**event)
        wait_until(lambda step=logged.step: (_get_run(api).get("last_step") or -1) >= step, SEEN_SECONDS)
        verdict = _get_run(api).get("verdict", {"verdict": "-", "reason": ""})
        color = {"continue": "dim", "suspect": "yellow", "stop": "bold red"}.get(verdict["verdict"], "")
        gold = f"{logged.gold:7.2f} ± {logged.gold_stderr:5.2f}"
        row = f"{logged.step:7d}  {logged.proxy:7.2f}  {gold}  {logged.kl:6.1f}  "
        console.print(f"{row}[{color}]{verdict['verdict']}[/]" if color else f"{row}{verdict['verdict']}")
        yield logged


def _wait_for_end(api: httpx.Client) -> dict[str, Any]:
    """The run after it has completed, or after its stop is confirmed."""
    wait_until(lambda: _get_run(api)["status"] in ("completed", "failed", "stopped"), CONFIRM_SECONDS)
    wait_until(
        lambda: not _get_run(api)["should_stop"] or _get_run(api)["decision"]["state"] == "confirmed", CONFIRM_SECONDS
    )
    return _get_run(api)


def continue_training(folder: Path, console: Console) -> tuple[int, list[Eval]]:
    """Train the stopped run to its planned end; returns the step of its last checkpoint and the evals after it.

    The signal ends a run mostly between two evals, and the trainer saves a checkpoint there.
    The result is bit for bit that of the same seed without an interruption.
    """
    trainer = load_checkpoint(max((folder / "checkpoints").glob("step-*.npz")))
    stopped_at = trainer.state.step
    remaining = (trainer.config.steps - stopped_at) // trainer.config.eval_every
    console.print("")
    description = "training the same run to its planned end"
    return stopped_at, list(track(trainer.evals(), description, total=remaining, console=console, transient=True))


def _print_end(console: Console, run: dict[str, Any], evals: Sequence[Eval], folder: Path) -> bool:
    """Print how the run ended; returns whether EvalStop stopped it."""
    decision, best = run["decision"], run["best_checkpoint"]
    stopped = decision is not None and decision["state"] == "confirmed"
    policy = f"{run['policy']['name']} version {run['policy']['version']}"
    console.print("")
    if stopped:
        last = decision["history"][-1]
        console.print(f"[bold red]Stopped[/] at step {decision['step']} of {run['total_steps']}")
        console.print(f"  policy      {policy}: {decision['verdict']['reason']}")
        console.print(f"  turn        estimated at step {run['verdict']['turn_step']}")
        console.print(f"  decision    {last['state']} by {last['actor']}: {last['reason']}")
    else:
        console.print(f"[bold green]{run['status'].capitalize()}[/] at step {evals[-1].step}, not stopped")
        console.print(f"  policy      {policy}: {run['verdict']['reason']}")
        if decision is not None:
            log = f"{folder}/service/service.log"
            at = f"at step {decision['step']}"
            console.print(f"[bold red]A stop {at} was requested but not carried out[/]; see {log}", soft_wrap=True)
    console.print(f"  checkpoint  step {best['step']}, eval {best['score']:.2f}: {best['uri']}", soft_wrap=True)
    return stopped


def _get_run(api: httpx.Client) -> dict[str, Any]:
    runs = api.get("/runs").raise_for_status().json()["items"]
    return dict(runs[0]) if runs else {}

"""`evalstop-lab demo`: a real training run over-optimizes, and EvalStop stops it and keeps the best checkpoint."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.rlhf.trainer import PRESETS, Eval, Trainer
from evalstop_lab.service_process import run_trainer, running_service, wait_until

EXAMPLES = """examples:
  evalstop-lab demo                        a run that over-optimizes and is stopped
  evalstop-lab demo --preset healthy       a run that stays healthy and completes
  evalstop-lab demo --json > summary.json  print the summary as JSON and the progress on stderr
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
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab demo`; return 0 if the run that over-optimizes was stopped, or the healthy one completed."""
    console = Console(stderr=args.json, highlight=False)
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
        summary = _summarize(args, _wait_for_end(api), evals, folder)
    if summary["stopped"]:
        stopped_at, later_evals = continue_training(folder, console)
        summary["share_of_steps_saved"] = 1 - stopped_at / summary["total_steps"]
        final = later_evals[-1] if later_evals else evals[-1]
        summary |= {
            "gold_had_it_run_on": final.gold,
            "gold_had_it_run_on_stderr": final.gold_stderr,
            "proxy_had_it_run_on": final.proxy,
            "rest": [asdict(item) for item in later_evals],
        }
        draw_picture(folder / "demo.png", evals, later_evals, summary)
    _print_summary(console, summary)
    if args.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if summary["stopped"] == (args.preset == "overoptimizes") else 1


def _follow_evals(api: httpx.Client, job: subprocess.Popen[str], console: Console) -> Iterator[Eval]:
    """Yield the evals that the trainer prints, after printing each with the service's verdict."""
    assert job.stdout is not None
    console.print(f"\n[bold]{'step':>7}  {'proxy':>7}  {'eval':>15}  {'KL':>6}  verdict[/bold]")
    for line in job.stdout:
        event = json.loads(line)
        if event.pop("event") != "eval":
            continue
        event.pop("checkpoint")
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


def _summarize(args: argparse.Namespace, run: dict[str, Any], evals: list[Eval], folder: Path) -> dict[str, Any]:
    decision = run["decision"]
    stopped = decision is not None and decision["state"] == "confirmed"
    return {
        "run": run["name"],
        "preset": args.preset,
        "seed": args.seed,
        "status": run["status"],
        "stopped": stopped,
        "stop_step": decision["step"] if decision else None,
        "policy": f"{run['policy']['name']} version {run['policy']['version']}",
        "reason": decision["verdict"]["reason"] if decision else run["verdict"]["reason"],
        "turn_step": run["verdict"]["turn_step"],
        "confirmed_by": decision["history"][-1] if decision else None,
        "best_checkpoint": run["best_checkpoint"],
        "last_step": evals[-1].step,
        "last_gold": evals[-1].gold,
        "total_steps": run["total_steps"],
        "folder": str(folder),
    }


def continue_training(folder: Path, console: Console) -> tuple[int, list[Eval]]:
    """Train the stopped run to its planned end; returns the step of its last checkpoint and the evals after it.

    The signal ends a run mostly between two evals, and the trainer saves a checkpoint there.
    The result is bit for bit that of the same seed without an interruption.
    """
    last = max((folder / "checkpoints").glob("step-*.npz"))
    saved = load_checkpoint(last)
    trainer = Trainer(saved.config, saved.state)
    remaining = (saved.config.steps - saved.state.step) // saved.config.eval_every
    console.print("")
    description = "training the same run to its planned end"
    evals = track(trainer.evals(), description, total=remaining, console=console, transient=True)
    return saved.state.step, list(evals)


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
    best = summary["best_checkpoint"]
    console.print("")
    if summary["stopped"]:
        console.print(f"[bold red]Stopped[/] at step {summary['stop_step']} of {summary['total_steps']}")
        console.print(f"  policy      {summary['policy']}: {summary['reason']}")
        console.print(f"  turn        estimated at step {summary['turn_step']}")
        last = summary["confirmed_by"]
        console.print(f"  decision    {last['state']} by {last['actor']}: {last['reason']}")
    else:
        console.print(f"[bold green]{summary['status'].capitalize()}[/] at step {summary['last_step']}, not stopped")
        console.print(f"  policy      {summary['policy']}: {summary['reason']}")
        if summary["stop_step"] is not None:
            log = f"{summary['folder']}/service/service.log"
            at = f"at step {summary['stop_step']}"
            console.print(f"[bold red]A stop {at} was requested but not carried out[/]; see {log}", soft_wrap=True)
    console.print(f"  checkpoint  step {best['step']}, eval {best['score']:.2f}: {best['uri']}", soft_wrap=True)
    if summary["stopped"]:
        console.print(
            f"  otherwise   eval {summary['gold_had_it_run_on']:.2f} ± {summary['gold_had_it_run_on_stderr']:.2f}"
            f" at step {summary['total_steps']}, measured by training the same seed to its planned end"
        )
        console.print(f"  saved       {100 * summary['share_of_steps_saved']:.0f} % of the steps")
        console.print(f"  picture     {summary['folder']}/demo.png", soft_wrap=True)


def _get_run(api: httpx.Client) -> dict[str, Any]:
    runs = api.get("/runs").raise_for_status().json()["items"]
    return dict(runs[0]) if runs else {}


EVAL, PROXY, STOP = "#b7791f", "#3b6fb6", "#c53030"


def draw_picture(path: Path, evals: Sequence[Eval], later_evals: Sequence[Eval], summary: dict[str, Any]) -> None:
    """Write a PNG of eval and proxy over steps: solid up to the stop, faint for the course without it."""
    from matplotlib.figure import Figure  # takes half a second, and no other command draws

    figure = Figure((10, 4.6), dpi=150, layout="constrained")
    eval_axis = figure.subplots()
    proxy_axis = eval_axis.twinx()
    for series, alpha, style in ((evals, 1.0, "-"), ([*evals[-1:], *later_evals], 0.35, "--")):
        steps = [item.step for item in series]
        proxy_axis.plot(steps, [item.proxy for item in series], style, color=PROXY, alpha=alpha, linewidth=1.6)
        eval_axis.plot(steps, [item.gold for item in series], style, color=EVAL, alpha=alpha, linewidth=2)
        low = [item.gold - item.gold_stderr for item in series]
        high = [item.gold + item.gold_stderr for item in series]
        eval_axis.fill_between(steps, low, high, color=EVAL, alpha=0.15 * alpha, linewidth=0)
    best = summary["best_checkpoint"]
    eval_axis.axvline(summary["stop_step"], color=STOP, linewidth=1.5)
    eval_axis.annotate(
        f"stopped at step {summary['stop_step']}",
        (summary["stop_step"], 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=STOP,
    )
    eval_axis.plot(best["step"], best["score"], "o", color=EVAL, markersize=9, markeredgecolor="white")
    eval_axis.annotate(
        f"best checkpoint: {best['score']:.2f}",
        (best["step"], best["score"]),
        xytext=(-2, 12),
        textcoords="offset points",
        ha="right",
    )
    final = later_evals[-1] if later_evals else evals[-1]
    eval_axis.annotate(
        f"without the stop: {final.gold:.2f}",
        (final.step, final.gold),
        xytext=(-12, -14),
        textcoords="offset points",
        ha="right",
        color=EVAL,
    )
    eval_axis.margins(y=0.12)
    eval_axis.set_xlabel("step")
    eval_axis.set_ylabel("eval (gold reward)", color=EVAL)
    proxy_axis.set_ylabel("proxy (training reward)", color=PROXY)
    for axis in (eval_axis, proxy_axis):
        axis.spines["top"].set_visible(False)
    figure.savefig(path)

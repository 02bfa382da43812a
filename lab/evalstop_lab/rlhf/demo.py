"""The main job from end to end: a real run over-optimizes, EvalStop sees it, stops it and keeps the best checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.errors import DemoFailed
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.rlhf.picture import draw
from evalstop_lab.rlhf.presets import PRESETS
from evalstop_lab.rlhf.trainer import Eval, Trainer
from evalstop_lab.service_process import Service, end, running_service

EXAMPLES = """examples:
  evalstop-lab demo                       a run that over-optimizes, and is stopped
  evalstop-lab demo --preset healthy      a run that does not, and finishes
  evalstop-lab demo --json > story.json   the summary for machines; the progress goes to stderr
"""

SEEN_SECONDS = 5.0
"""How long a row waits for the service to have seen its eval."""

CONFIRM_SECONDS = 30.0
"""How long after the job's end its stop may take to be confirmed."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="the main job, end to end: service, receiver and a training run that is stopped when its eval has turned",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="overoptimizes", help="which run to train")
    parser.add_argument("--seed", type=whole_number, default=0, help="decides all of its chance (default: 0)")
    parser.add_argument("--policy", default="default", help="by which it is judged; paper stops after 3 declines")
    parser.add_argument("--hasten", type=positive_number, default=1, help="fewer, larger steps: the same story, sooner")
    parser.add_argument("--folder", type=Path, help="where everything is kept (default: a new one in .evalstop/)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab demo`; 0 when the run that over-optimizes was stopped, or the healthy one finished."""
    console = Console(stderr=args.json, highlight=False)
    folder = (args.folder or _new_folder()).resolve()
    with running_service(folder / "service") as service, _client(service) as api:
        terms = {"default_mode": "enforce", "max_mode": "enforce", "held_out_share": 0}
        api.patch("/project", json=terms).raise_for_status()
        console.print("Every stop is carried out here; elsewhere a tenth is held out, to learn whether it was right.")
        console.print(f"EvalStop is up; watch the run in a browser: {service.sign_in}", soft_wrap=True)
        with _training(args, service, folder) as job:
            _subscribe(api, folder, job)
            evals = list(_watch(api, job, console))
            job.wait()
        story = _summary(args, _ended(api), evals, folder)
    if story["stopped"]:
        rest = _left_to_run(folder, console)
        story |= _what_was_saved(story, evals, rest)
        draw(folder / "demo.png", evals, rest, story)
    _tell(console, story)
    if args.json:
        sys.stdout.write(json.dumps(story) + "\n")
    return 0 if story["stopped"] == (args.preset == "overoptimizes") else 1


@contextmanager
def _training(args: argparse.Namespace, service: Service, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The trainer as the child of a process receiver, which is what ends it."""
    trainer = [sys.executable, "-m", "evalstop_lab.cli", "train", "--json", "--stop-by", "signal"]
    trainer += ["--preset", args.preset, "--seed", str(args.seed), "--hasten", str(args.hasten)]
    trainer += ["--policy", args.policy]
    trainer += ["--checkpoints", str(folder / "checkpoints")]
    receiver = [sys.executable, "-m", "evalstop_client.receivers.cli", "process"]
    receiver += ["--secret-file", str(folder / "secret"), "--ready-file", str(folder / "ready.json")]
    receiver += ["--job-key-env", "EVALSTOP_KEY"]
    environment = os.environ | {"EVALSTOP_URL": service.url, "EVALSTOP_KEY": service.key}
    with (folder / "receiver.log").open("w") as log:
        process = subprocess.Popen(
            [*receiver, "--", *trainer],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    try:
        yield process
    finally:
        end(process)


def _subscribe(api: httpx.Client, folder: Path, job: subprocess.Popen[str]) -> None:
    """Tell the service where the receiver listens, and the receiver by which secret it knows the service."""
    ready = folder / "ready.json"
    _until(lambda: ready.exists() or job.poll() is not None, CONFIRM_SECONDS)
    if not ready.exists():
        raise DemoFailed(f"The receiver did not start; see {folder / 'receiver.log'}")
    url = json.loads(ready.read_text())["url"]
    endpoint = api.post("/endpoints", json={"url": url, "event_types": ["run.stop_requested"]}).raise_for_status()
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(endpoint.json()["secret"])


def _watch(api: httpx.Client, job: subprocess.Popen[str], console: Console) -> Iterator[Eval]:
    """The evals as the trainer prints them, each shown with the verdict that the service came to."""
    assert job.stdout is not None
    console.print(f"\n[bold]{'step':>7}  {'proxy':>7}  {'eval':>15}  {'KL':>6}  verdict[/bold]")
    for line in job.stdout:
        event = json.loads(line)
        if event.pop("event") != "eval":
            continue
        event.pop("checkpoint")
        seen = Eval(**event)
        _until(lambda step=seen.step: (_run(api).get("last_step") or -1) >= step, SEEN_SECONDS)
        verdict = _run(api).get("verdict", {"verdict": "-", "reason": ""})
        color = {"continue": "dim", "suspect": "yellow", "stop": "bold red"}.get(verdict["verdict"], "")
        row = f"{seen.step:7d}  {seen.proxy:7.2f}  {seen.gold:7.2f} ± {seen.gold_stderr:5.2f}  {seen.kl:6.1f}  "
        console.print(f"{row}[{color}]{verdict['verdict']}[/]" if color else f"{row}{verdict['verdict']}")
        yield seen


def _ended(api: httpx.Client) -> dict[str, Any]:
    """The run once its end is on record: its own, or a confirmed stop."""
    _until(lambda: _run(api)["status"] in ("completed", "failed", "stopped"), CONFIRM_SECONDS)
    _until(lambda: not _run(api)["should_stop"] or _run(api)["decision"]["state"] == "confirmed", CONFIRM_SECONDS)
    return _run(api)


def _summary(args: argparse.Namespace, run: dict[str, Any], evals: list[Eval], folder: Path) -> dict[str, Any]:
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


def _left_to_run(folder: Path, console: Console) -> list[Eval]:
    """What the same seed measures when nobody stops it: it goes on from the last checkpoint, bit for bit the same."""
    last = max((folder / "checkpoints").glob("step-*.npz"))
    saved = load_checkpoint(last)
    trainer = Trainer(saved.config, saved.state)
    remaining = (saved.config.steps - saved.state.step) // saved.config.eval_every
    console.print("")
    description = "the same seed, left to run on"
    return list(track(trainer.evals(), description, total=remaining, console=console, transient=True))


def _what_was_saved(story: dict[str, Any], evals: list[Eval], rest: list[Eval]) -> dict[str, Any]:
    final = rest[-1] if rest else evals[-1]
    return {
        "gold_had_it_run_on": final.gold,
        "gold_had_it_run_on_stderr": final.gold_stderr,
        "proxy_had_it_run_on": final.proxy,
        "share_of_steps_saved": 1 - story["last_step"] / story["total_steps"],
        "rest": [asdict(item) for item in rest],
    }


def _tell(console: Console, story: dict[str, Any]) -> None:
    best = story["best_checkpoint"]
    console.print("")
    if story["stopped"]:
        console.print(f"[bold red]Stopped[/] at step {story['stop_step']} of {story['total_steps']}")
        console.print(f"  by       policy {story['policy']}: {story['reason']}")
        console.print(f"  turned   at step {story['turn_step']}, as far as the detectors can tell")
        confirmed = story["confirmed_by"]
        console.print(f"  ended    {confirmed['state']} by {confirmed['actor']}: {confirmed['reason']}")
    else:
        console.print(f"[bold green]{story['status'].capitalize()}[/] at step {story['last_step']}, never stopped")
        console.print(f"  verdict  policy {story['policy']}: {story['reason']}")
        if story["stop_step"] is not None:
            log = f"{story['folder']}/service/service.log"
            at = f"at step {story['stop_step']}"
            console.print(f"[bold red]A stop {at} was asked for but not carried out[/]; see {log}", soft_wrap=True)
    console.print(f"  kept     step {best['step']}, eval {best['score']:.2f}: {best['uri']}", soft_wrap=True)
    if story["stopped"]:
        console.print(
            f"  instead  eval {story['gold_had_it_run_on']:.2f} ± {story['gold_had_it_run_on_stderr']:.2f}"
            f" at step {story['total_steps']}, measured on the same seed left to run"
        )
        console.print(f"  saved    {100 * story['share_of_steps_saved']:.0f} % of the steps")
        console.print(f"  picture  {story['folder']}/demo.png", soft_wrap=True)


def _client(service: Service) -> httpx.Client:
    headers = {"Authorization": f"Bearer {service.key}"}
    return httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=10)


def _run(api: httpx.Client) -> dict[str, Any]:
    runs = api.get("/runs").raise_for_status().json()["items"]
    return dict(runs[0]) if runs else {}


def _until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _new_folder() -> Path:
    home = Path(".evalstop")
    home.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="demo-", dir=home))

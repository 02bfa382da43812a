"""Draws the pictures of docs/images that show pages, from real recorded runs: `python -m tests.screenshots`."""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from evalstop_detectors import POLICIES, policy_to_document
from evalstop_lab import cli as lab_cli
from evalstop_service.cli import demo_data
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.store import keys, projects, schema
from evalstop_service.store.database import Database
from playwright.sync_api import Browser, Page

from tests.fixtures.recorded_runs import load_run_records
from tests.service.web.pages.recorded_groups import train_population
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import launch_chromium, sign_in_link, start_dashboard_server

FOLDER = Path(__file__).parents[1] / "docs" / "images"

NOW = datetime.now(UTC)

# Small token policies, named by how they were trained: name, run of the data set, share that is told,
# mode, how it ended, hours since it began.
RUNS = (
    ("grpo-beta0.2-seed82", "np-0082", 1.0, "enforce", "completed", 31.0),
    ("grpo-beta0-seed52", "np-0052", 1.0, "shadow", "completed", 29.0),
    ("grpo-beta0-seed192", "np-0192", 1.0, "shadow", "completed", 27.0),
    ("grpo-beta0-seed118", "np-0118", 0.5, "shadow", "failed", 22.0),
    ("grpo-beta0.1-seed180", "np-0180", 1.0, "enforce", "stopped", 9.0),
    ("grpo-beta0.05-seed44", "np-0044", 1.0, "enforce", "stopped", 4.0),
    ("grpo-beta0-seed188", "np-0188", 0.66, "enforce", None, 0.95),
    ("grpo-beta0.2-seed60", "np-0060", 0.7, "enforce", None, 0.72),
)

SHOWN = "grpo-beta0.05-seed44"

COMPARED = ("grpo-beta0.2-seed82", "grpo-beta0-seed52", "grpo-beta0-seed192", SHOWN, "grpo-beta0.1-seed180")


def main() -> None:
    """Tell the runs, look at them, keep the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures are put")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        database = Database(f"sqlite:///{scratch}/evalstop.db")
        schema.upgrade_schema(database)
        tenant = add_tenant(database, NOW - timedelta(days=2))
        ids = tell(tenant)
        swept = add_tenant(database, NOW, "sweep")
        train_population(swept, "ppo-population")
        demo = demonstrated(database)
        backtested = backtest(database, demo)
        compared = "&".join(f"run={ids[name]}" for name in COMPARED)
        told = {
            "runs": "/runs",
            "run": f"/runs/{ids[SHOWN]}",
            "compare": f"/runs/compare?{compared}&x=sqrt_kl&smoothing=0.5",
        }
        drawn = {
            "overview": "/",
            "fleet": "/runs/fleet",
            "precision": "/precision",
            "policies": "/policies",
            "policy": "/policies/early?against=default@1",
            "labeling": "/precision/label",
            "backtest": f"/policies/backtests/{backtested}",
        }
        with start_dashboard_server(database) as address, launch_chromium() as browser:
            for visitor, paths in ((tenant, told), (swept, {"group": "/groups/ppo-population"}), (demo, drawn)):
                for name, path in paths.items():
                    file = arguments.folder / f"{name}.png"
                    # Of the long page of a backtest the first screen is enough.
                    shoot(browser, address, visitor, path, file, 660 if name == "runs" else 800, name != "backtest")
            shoot_backtest(browser, Path(scratch), arguments.folder / "backtest-report.png")
        database.close()


def demonstrated(database: Database) -> Tenant:
    """The example runs of `evalstop demo-data`, which have a past and outcomes, and a policy on its way to canary."""
    demo_data.fill(database, "demo", NOW)
    with database.transaction() as tx:
        project = projects.find_project_by_name(tx, "demo")
        assert project is not None
        begun = NOW - timedelta(days=90)
        rollout_stage.set_rollout_stage(tx, project.id, "early", 1, StageTerms(0.9, 0.2), begun)
        key, secret = keys.create_key(tx, project_id=project.id, name="dana", scopes=keys.SCOPES, now=NOW)
    return Tenant(database, project.id, project=project, key=key, secret=secret)


def backtest(database: Database, tenant: Tenant) -> UUID:
    """`cautious` tried on the example runs."""
    document = policy_to_document(POLICIES["cautious"])
    return backtests.run_backtest(database, tenant.id, document, backtests.MOST_RUNS, "dana", NOW).id


def shoot_backtest(browser: Browser, scratch: Path, file: Path) -> None:
    """A picture of the page that `evalstop-lab backtest` writes of the recorded runs, down to the worst of them."""
    log, made = scratch / "recorded.jsonl", scratch / "backtest.html"
    names = {"step": "step", "gold": "eval", "gold_se": "eval_stderr", "proxy": "proxy", "kl": "kl"}
    with log.open("w", encoding="utf-8") as lines:
        for record in load_run_records():
            for values in zip(*(record["log"][name] for name in names), strict=True):
                row = dict(zip(names.values(), values, strict=True))
                lines.write(json.dumps({"run": record["run_id"], **row}) + "\n")
    lab_cli.main(["backtest", str(log), "--policy", "default", "--against", "paper", "--html", str(made)])
    with browser.new_page(viewport={"width": 1160, "height": 1560}, color_scheme="light") as page:
        page.goto(made.as_uri())
        page.wait_for_selector("#runs .drawing svg")
        page.screenshot(path=file)
    print(file)


def tell(tenant: Tenant) -> dict[str, UUID]:
    """Open and report the runs; gives their ids by name."""
    ids: dict[str, UUID] = {}
    for index, (name, run_id, share, mode, ended, hours) in enumerate(RUNS):
        begun = NOW - timedelta(hours=hours)
        evals = load_recorded_evals(run_id)
        labels = {"slurm_job_id": str(4700 + index), "host": "worker-1"}
        run = tenant.open_run(name, begun, mode=mode, labels=labels, total_steps=evals[-1].step, policy="default")
        ids[name] = run.id
        last = begun
        for number, item in enumerate(evals[: int(share * len(evals))]):
            last = begun + timedelta(minutes=2 * number)
            receipt = tenant.post_evals(run, (item,), last)
            if ended == "stopped" and receipt.decision:
                tenant.confirm_stop(receipt.decision, last + timedelta(seconds=9))
                break
        if ended in ("completed", "failed"):
            tenant.finish_run(run, ended, now=last)
    return ids


def shoot(browser: Browser, address: str, visitor: Tenant, path: str, file: Path, height: int, whole: bool) -> None:
    """A picture of a whole page, or of its first screen."""
    with browser.new_context(
        viewport={"width": 1280, "height": height},
        color_scheme="light",
        reduced_motion="reduce",
        device_scale_factor=1.5,
    ) as context:
        page = context.new_page()
        page.goto(f"{address}{sign_in_link(visitor.key)}&next=/runs")
        page.wait_for_url(f"{address}/runs")
        page.goto(address + path)
        wait_until_drawn(page)
        page.screenshot(path=file, full_page=whole)
    print(file)


def wait_until_drawn(page: Page) -> None:
    """Return once the page is live and its chart stands."""
    if page.locator("[data-revision]").count():
        page.wait_for_selector('.live[data-live="on"]')
    for chart in ("#chart", "#detectors-chart", "#over-time-chart"):
        if page.locator(chart).count():
            page.wait_for_selector(f"{chart} .scatterlayer, .chart-empty:not([hidden])", state="attached")


if __name__ == "__main__":
    main()

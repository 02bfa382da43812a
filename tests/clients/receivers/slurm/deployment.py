"""A deployment for end-to-end tests: a real service, receivers as programs, and jobs in a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from evalstop_lab.service_process import Service

from tests.clients.programs import wait_until
from tests.clients.receivers.receiver_program import RECEIVER
from tests.clients.receivers.slurm import trainer
from tests.fixtures.slurm import SlurmCluster

STOP_SECONDS = 90.0
EVENT_TYPES = ["run.stop_requested", "run.stop_escalated", "run.park_requested", "run.resume_requested"]


@dataclass
class Job:
    """A submitted job, and the folder that it writes to."""

    id: str
    run: str
    folder: Path

    def read_events(self) -> dict[str, float]:
        """When each event of the trainer happened, by its name."""
        file = self.folder / "events"
        lines = file.read_text().splitlines() if file.exists() else []
        return {event: float(at) for at, _, event in (line.partition(" ") for line in lines)}

    def count_events(self, event: str) -> int:
        """How often an event happened."""
        return [line.partition(" ")[2] for line in (self.folder / "events").read_text().splitlines()].count(event)


@dataclass
class Deployment:
    """Cluster, service and receivers of a test."""

    cluster: SlurmCluster
    service: Service
    api: httpx.Client
    folder: Path
    receivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def submit_trainer(self, run: str, *options: str, gpus: int = 1) -> Job:
        """Submit a job that runs the trainer for tests as its batch process."""
        command = f"exec {sys.executable} {trainer.__file__} {run} {self.make_folder(run)} {' '.join(options)}"
        return self.submit_script(run, command, gpus=gpus)

    def submit_script(self, run: str, script: str, gpus: int = 1, **variables: str) -> Job:
        """Submit a job that runs a bash script, with the service's URL and key in its environment."""
        folder = self.make_folder(run)
        environment = {
            "EVALSTOP_URL": self.service.url,
            "EVALSTOP_KEY": self.service.key,
            "EVALSTOP_RUN_NAME": run,
            "EVALSTOP_SPOOL": str(folder / "spool"),
            **variables,
        }
        job = self.cluster.submit_job(script, f"--gres=gpu:{gpus}", f"--output={folder}/output", **environment)
        return Job(job, run, folder)

    def create_endpoint(self, url: str) -> str:
        """Create an endpoint for a receiver that listens, and return its secret."""
        body = {"url": url, "event_types": EVENT_TYPES}
        return str(self.api.post("/endpoints", json=body).raise_for_status().json()["secret"])

    def start_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a receiver; one of the same name continues with the journal of the one before."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "ready.json").unlink(missing_ok=True)
        command = [*RECEIVER, "slurm", "--state", str(folder / "state")]
        command += ["--secret-file", str(folder / "secret"), "--ready-file", str(folder / "ready.json")]
        command += ["--poll-seconds", "0.2", *options]
        environment = {**self.cluster.environment, "EVALSTOP_URL": self.service.url, "EVALSTOP_KEY": self.service.key}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stderr=log, env=environment)
        self.receivers.append(process)
        wait_until(lambda: (folder / "ready.json").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        return process

    def start_listening_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a receiver that listens, always on the same port, with an endpoint of its own."""
        folder = self.folder / name
        ready = folder / "ready.json"
        port = str(json.loads(ready.read_text())["port"]) if ready.exists() else "0"
        process = self.start_receiver(name, "--listen", f"127.0.0.1:{port}", *options)
        if port == "0":
            (folder / "secret").write_text(self.create_endpoint(json.loads(ready.read_text())["url"]))
        return process

    def start_pulling_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a receiver that fetches its events."""
        body = {"name": name, "event_types": EVENT_TYPES}
        endpoint = self.api.post("/pull/endpoints", json=body).raise_for_status().json()
        folder = self.folder / name
        folder.mkdir()
        (folder / "secret").write_text(endpoint["secret"])
        return self.start_receiver(name, "--pull", endpoint["id"], *options)

    def read_log(self, name: str) -> str:
        """What a receiver logged."""
        return (self.folder / name / "log").read_text()

    def find_decision(self, job: Job) -> dict[str, Any] | None:
        """The decision on a job's run."""
        run = self.find_run(job)
        return run and run["decision"]

    def find_run(self, job: Job) -> dict[str, Any] | None:
        """A job's run, as the service has it."""
        items = self.api.get("/runs", params={"name": job.run}).raise_for_status().json()["items"]
        return items[0] if items else None

    def wait_for_confirmation(self, job: Job) -> dict[str, Any]:
        """The details of the report that confirmed a job's stop."""

        def find_outcome() -> dict[str, Any] | None:
            decision = self.find_decision(job)
            return decision if decision and decision["state"] in ("confirmed", "failed") else None

        decision = wait_until(find_outcome, STOP_SECONDS)
        assert decision is not None
        history = self.api.get(f"/decisions/{decision['id']}").raise_for_status().json()["history"]
        change = history[-1]
        assert change["state"] == "confirmed", change
        assert self.cluster.get_job_state(job.id) not in ("RUNNING", "COMPLETING", "PENDING"), "confirmed too early"
        details: dict[str, Any] = change["details"] | {"reason": change["reason"], "actor": change["actor"]}
        return details

    def make_folder(self, run: str) -> Path:
        """The folder that a run writes to."""
        folder = self.folder / run
        folder.mkdir(exist_ok=True)
        return folder


@contextmanager
def deploy(cluster: SlurmCluster, service: Service, folder: Path) -> Iterator[Deployment]:
    """A deployment without endpoints; its receivers and jobs end with the block."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=30, trust_env=False) as api:
        # Each test here has some of its few jobs stopped.
        api.patch("/project", json={"stops_per_hour": None, "stops_share": None}).raise_for_status()
        deployment = Deployment(cluster, service, api, folder)
        try:
            yield deployment
        finally:
            for receiver in deployment.receivers:
                if receiver.poll() is None:
                    receiver.kill()
                receiver.wait()
            for endpoint in api.get("/endpoints").json()["items"]:
                api.delete(f"/endpoints/{endpoint['id']}")
            cluster.cancel_all_jobs()

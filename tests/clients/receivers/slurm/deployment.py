"""The stage for whole stops: a real service, a real receiver as a program, jobs in a real Slurm."""

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

PATIENCE_SECONDS = 90.0
WANTED = ["run.stop_requested", "run.stop_escalated", "run.park_requested", "run.resume_requested"]


@dataclass
class Job:
    """A job that was submitted, with the folder it writes to."""

    id: str
    run: str
    folder: Path

    def story(self) -> dict[str, float]:
        """When what happened to it, in its own words."""
        file = self.folder / "story"
        lines = file.read_text().splitlines() if file.exists() else []
        return {what: float(at) for at, _, what in (line.partition(" ") for line in lines)}

    def times(self, what: str) -> int:
        """How often something happened."""
        return [line.partition(" ")[2] for line in (self.folder / "story").read_text().splitlines()].count(what)


@dataclass
class Stage:
    """What a test plays on."""

    cluster: SlurmCluster
    service: Service
    api: httpx.Client
    folder: Path
    receivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def submit(self, run: str, *options: str, gpus: int = 1) -> Job:
        """A job that runs the trainer for tests, as its batch process."""
        command = f"exec {sys.executable} {trainer.__file__} {run} {self._folder(run)} {' '.join(options)}"
        return self.batch(run, command, gpus=gpus)

    def batch(self, run: str, script: str, gpus: int = 1, **variables: str) -> Job:
        """A job that runs a script of bash, told where the service is."""
        folder = self._folder(run)
        environment = {
            "EVALSTOP_URL": self.service.url,
            "EVALSTOP_KEY": self.service.key,
            "EVALSTOP_RUN_NAME": run,
            "EVALSTOP_SPOOL": str(folder / "spool"),
            **variables,
        }
        job = self.cluster.submit_job(script, f"--gres=gpu:{gpus}", f"--output={folder}/output", **environment)
        return Job(job, run, folder)

    def subscribe(self, url: str) -> str:
        """An endpoint for a receiver that listens; its secret."""
        body = {"url": url, "event_types": WANTED}
        return str(self.api.post("/endpoints", json=body).raise_for_status().json()["secret"])

    def start_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """A receiver; the same name again goes on with the memory of the one before."""
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

    def listening_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """A receiver that listens, and that the service knows of; always on the same port."""
        folder = self.folder / name
        ready = folder / "ready.json"
        port = str(json.loads(ready.read_text())["port"]) if ready.exists() else "0"
        process = self.start_receiver(name, "--listen", f"127.0.0.1:{port}", *options)
        if port == "0":
            (folder / "secret").write_text(self.subscribe(json.loads(ready.read_text())["url"]))
        return process

    def pulling_receiver(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """A receiver that fetches its events."""
        body = {"name": name, "event_types": WANTED}
        endpoint = self.api.post("/pull/endpoints", json=body).raise_for_status().json()
        folder = self.folder / name
        folder.mkdir()
        (folder / "secret").write_text(endpoint["secret"])
        return self.start_receiver(name, "--pull", endpoint["id"], *options)

    def log(self, name: str) -> str:
        """What a receiver said."""
        return (self.folder / name / "log").read_text()

    def decision(self, job: Job) -> dict[str, Any] | None:
        """The decision on a job's run."""
        found = self.run(job)
        return found and found["decision"]

    def run(self, job: Job) -> dict[str, Any] | None:
        """A job's run, as the service knows it."""
        items = self.api.get("/runs", params={"name": job.run}).raise_for_status().json()["items"]
        return items[0] if items else None

    def confirmed(self, job: Job) -> dict[str, Any]:
        """The details of the report that confirmed the stop of a job."""

        def look() -> dict[str, Any] | None:
            decision = self.decision(job)
            return decision if decision and decision["state"] in ("confirmed", "failed") else None

        decision = wait_until(look, PATIENCE_SECONDS)
        assert decision is not None
        found = self.api.get(f"/decisions/{decision['id']}").raise_for_status().json()
        change = found["history"][-1]
        assert change["state"] == "confirmed", change
        assert self.cluster.get_job_state(job.id) not in ("RUNNING", "COMPLETING", "PENDING"), "confirmed too early"
        details: dict[str, Any] = change["details"] | {"reason": change["reason"], "actor": change["actor"]}
        return details

    def _folder(self, run: str) -> Path:
        folder = self.folder / run
        folder.mkdir(exist_ok=True)
        return folder


@contextmanager
def staged(cluster: SlurmCluster, service: Service, folder: Path) -> Iterator[Stage]:
    """A stage without endpoints; its receivers and jobs end with it."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=30, trust_env=False) as api:
        # Each test here has some of its few jobs stopped.
        api.patch("/project", json={"stops_per_hour": None, "stops_share": None}).raise_for_status()
        stage = Stage(cluster, service, api, folder)
        try:
            yield stage
        finally:
            for receiver in stage.receivers:
                if receiver.poll() is None:
                    receiver.kill()
                receiver.wait()
            for endpoint in api.get("/endpoints").json()["items"]:
                api.delete(f"/endpoints/{endpoint['id']}")
            cluster.cancel_all_jobs()

"""Brings up munged, slurmctld, slurmd and slurmrestd as children, waits until a job could run, and ends them all."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from evalstop_lab.errors import LabError
from evalstop_lab.slurm.configuration import CLUSTER, Plan, gres_conf, slurm_conf

START_SECONDS = 30.0
COMMAND_SECONDS = 30.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmrestd", "sbatch", "scancel", "setpriv")
FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "munge", "rest")


class NoSlurm(LabError):
    """There is no Slurm to test with: `make system-packages` installs Debian's packages."""


class SlurmFailed(LabError):
    """A part of the Slurm for tests does not do what it should."""


class SlurmCluster:
    """A cluster that is up. `environment` is what its commands need."""

    name = CLUSTER

    def __init__(self, plan: Plan, rest_port: int) -> None:
        self.folder = plan.folder
        self.rest_url = f"http://127.0.0.1:{rest_port}"
        self.environment = {**os.environ, "SLURM_CONF": str(plan.folder / "etc/slurm.conf"), "PATH": _path()}
        self._plan = plan
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str) -> str:
        """What one of Slurm's commands prints; SlurmFailed when it ends with an error."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        if done.returncode != 0:
            raise SlurmFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """Submit a batch script with these options and variables beside ours; the job's id."""
        file = self.folder / f"job-{secrets.token_hex(4)}.sh"
        file.write_text(f"#!/bin/bash\n{script}")
        environment = {**self.environment, **variables}
        command = ["sbatch", "--parsable", *options, str(file)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        if done.returncode != 0:
            raise SlurmFailed(f"sbatch: {done.stderr.strip()}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, COMPLETING while it is that."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`; "" when there is none."""
        parts = self.run("scontrol", "--oneliner", "show", "job", job).split(f" {name}=")
        return parts[1].split(" ")[0] if len(parts) > 1 else ""

    def token(self, lifespan_seconds: int = 600) -> str:
        """A JWT for slurmrestd."""
        return self.run("scontrol", "token", f"lifespan={lifespan_seconds}").removeprefix("SLURM_JWT=")

    def start(self) -> None:
        """Start all daemons and wait until the node is idle."""
        folder = self.folder
        munged = ["munged", "--foreground", f"--key-file={folder}/munge/key", f"--socket={folder}/run/munge.socket"]
        munged += [f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/log/munged.log"]
        munged += [f"--seed-file={folder}/munge/seed", "--num-threads=2", "--origin=127.0.0.1"]
        self._start("munged", munged)
        self._until(lambda: (folder / "run/munge.socket").exists(), "munged")
        self.start_controller()
        self._start("slurmd", ["slurmd", "-D", "-N", "gpunode", "-f", f"{folder}/etc/slurm.conf"])
        self._until(lambda: self._answers("sinfo", "--noheader", "--format=%T") == "idle", "slurmd")
        self._start("slurmrestd", self._slurmrestd(), SLURM_JWT="daemon", **_unchecked())
        self._until(lambda: _listens(self.rest_url), "slurmrestd")

    def start_controller(self) -> None:
        """Start slurmctld, with the jobs that it knew before if it was stopped."""
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "etc/slurm.conf")])
        self._until(lambda: "UP" in (self._answers("scontrol", "ping") or ""), "slurmctld")

    def stop_controller(self) -> None:
        """End slurmctld; jobs run on, and nobody is answered."""
        self._end("slurmctld", signal.SIGTERM)

    def clear(self) -> None:
        """End all jobs, also those that do not want to, and wait until none is left."""
        deadline = time.monotonic() + self._plan.kill_wait_seconds + START_SECONDS
        while jobs := self._answers("squeue", "--noheader", "--format=%A"):
            self._answers("scancel", "--signal=KILL", "--full", *jobs.split())
            self._answers("scancel", *jobs.split())
            if time.monotonic() > deadline:
                raise SlurmFailed(f"these jobs do not go: {jobs}")
            time.sleep(0.1)

    def end(self) -> None:
        """End all jobs, for they outlive slurmd, and then the daemons."""
        if "slurmd" in self._daemons and "slurmctld" in self._daemons:
            self.clear()
        for name in ("slurmrestd", "slurmd", "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)

    def log(self, name: str) -> str:
        """The last of what a daemon wrote."""
        file = self.folder / "log" / f"{name}.log"
        return file.read_text(errors="replace")[-3_000:] if file.exists() else ""

    def _slurmrestd(self) -> list[str]:
        # It refuses to be root or Slurm's own user; as root we make it nobody, else the check is switched off.
        command = ["slurmrestd", "-a", "rest_auth/jwt", "-s", "openapi/v0.0.38"]
        command.append(self.rest_url.removeprefix("http://"))
        if os.geteuid() != 0:
            return command
        nobody = pwd.getpwnam("nobody")
        return ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups", *command]

    def _start(self, name: str, command: list[str], **variables: str) -> None:
        # The kernel's parent-death signal ends it even when the tests are killed.
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **variables},
                start_new_session=True,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.send_signal(number)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _answers(self, *command: str) -> str | None:
        try:
            return self.run(*command)
        except (SlurmFailed, subprocess.TimeoutExpired):
            return None

    def _until(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            daemon = self._daemons[name]
            if daemon.poll() is not None or time.monotonic() > deadline:
                out = (self.folder / "log" / f"{name}.out").read_text(errors="replace")[-2_000:]
                raise SlurmFailed(f"{name} does not come up (exit code {daemon.poll()}):\n{out}{self.log(name)}")
            time.sleep(0.05)


@contextmanager
def slurm(gpus: int = 2, kill_wait_seconds: int = 3) -> Iterator[SlurmCluster]:
    """A cluster of one node with `gpus` fake GPUs; NoSlurm where Slurm is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        raise NoSlurm(f"Missing: {', '.join(missing)}.")
    folder = Path(tempfile.mkdtemp(prefix="evalstop-slurm-"))
    folder.chmod(0o755)  # munge's socket and slurm.conf are for everybody
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        controller_port, node_port, rest_port = _free_ports(3)
        hostname = socket.gethostname().partition(".")[0]
        plan = Plan(
            folder=folder,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            hostname=hostname,
            address=_address(hostname),
            controller_port=controller_port,
            node_port=node_port,
            gpus=gpus,
            kill_wait_seconds=kill_wait_seconds,
        )
        _write(plan)
        cluster = SlurmCluster(plan, rest_port)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster


def _write(plan: Plan) -> None:
    for name in FOLDERS:
        (plan.folder / name).mkdir()
    (plan.folder / "state").chmod(0o700)
    for name, size in (("munge/key", 128), ("etc/jwt.key", 32)):
        key = plan.folder / name
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(size))
    (plan.folder / "etc/slurm.conf").write_text(slurm_conf(plan))
    (plan.folder / "etc/gres.conf").write_text(gres_conf(_devices(plan)))


def _devices(plan: Plan) -> list[Path]:
    """As root copies of /dev/null, as anybody else devices that are there."""
    if os.geteuid() != 0:
        found = sorted(device for device in Path("/dev").iterdir() if device.is_char_device())
        return found[: plan.gpus]
    devices = [plan.folder / "dev" / f"gpu{number}" for number in range(plan.gpus)]
    for device in devices:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return devices


def _unchecked() -> dict[str, str]:
    return {} if os.geteuid() == 0 else {"SLURMRESTD_SECURITY": "disable_user_check"}


def _address(hostname: str) -> str:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return "127.0.0.1"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def _path() -> str:
    """Ours, with the folders of system programs that a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

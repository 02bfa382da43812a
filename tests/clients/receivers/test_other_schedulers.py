"""The recipes of docs/other-schedulers.md: their scripts are shell, and those marked as run are run."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.acceptance.docs.connect_pages import read_block
from tests.acceptance.docs.documents import ROOT, Block, read_blocks, read_commands
from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import running_program, wait_until
from tests.clients.receivers.receiver_program import ReceiverProgram
from tests.clients.webhooks import make_stop_event, post_event
from tests.fixtures.free_ports import find_free_ports

PAGE = ROOT / "docs/other-schedulers.md"
SCRIPTS = [block for block in read_blocks(PAGE) if block.text.startswith("#!/bin/sh")]
STARTS_WITHIN_SECONDS = 300.0

GRID_ENGINE = """
set -eu
mkdir -p $SGE_ROOT/default/common $SGE_ROOT/spool/qmaster/job_scripts $SGE_ROOT/spool/db $SGE_ROOT/spool/execd
for part in bin lib util utilbin; do ln -s /var/lib/gridengine/$part $SGE_ROOT/$part; done
cd $SGE_ROOT
sed "s#^admin_user .*#admin_user none#; s#^spooling_params .*#spooling_params $SGE_ROOT/spool/db#
  s#^qmaster_spool_dir .*#qmaster_spool_dir $SGE_ROOT/spool/qmaster#" \
  /var/lib/gridengine/default/common/bootstrap > default/common/bootstrap
echo localhost > default/common/act_qmaster
echo "localhost $(hostname)" > default/common/host_aliases
sed "s/^min_\\([ug]\\)id .*/min_\\1id 0/; s#^execd_spool_dir .*#execd_spool_dir $SGE_ROOT/spool/execd#" \
  /usr/share/gridengine/default-configuration > configuration
PATH=/usr/lib/gridengine:$PATH
spoolinit berkeleydb libspoolb $SGE_ROOT/spool/db init
spooldefaults configuration configuration
spooldefaults complexes /usr/share/gridengine/util/resources/centry
spooldefaults usersets /usr/share/gridengine/util/resources/usersets
spooldefaults managers root
sge_qmaster
until qconf -sh; do sleep 0.2; done
qconf -as localhost
{ echo hostname localhost; for field in load_scaling complex_values user_lists xuser_lists projects xprojects \
  usage_scaling report_variables; do echo $field NONE; done; } > host
qconf -Ae host
cat > editor << "END"
#!/bin/sh
sed -i "s/^hostlist .*/hostlist localhost/; s/^pe_list .*/pe_list NONE/" "$1"
sed -i "s/^load_thresholds .*/load_thresholds NONE/" "$1"
touch -d "+2 seconds" "$1"  # qconf takes only a file that has changed
END
chmod +x editor
EDITOR=$SGE_ROOT/editor qconf -aq main
sge_execd
"""
"""A cluster of one node in a folder of its own, by what Debian's package does when it is installed."""


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_scripts_are_shell(block: Block) -> None:
    """Each script is one that sh can read."""
    assert subprocess.run(["sh", "-n"], input=block.text, text=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("jq") is None, reason="two scripts need jq")
@pytest.mark.parametrize(
    ("block", "fails"),
    # To two scripts the exit code of qstat is the answer, not its words.
    [(block, fails) for block in SCRIPTS for fails in (True, False) if fails or "qstat" not in block.text],
    ids=str,
)
def test_scheduler_that_does_not_answer_is_asked_again(tmp_path: Path, block: Block, fails: bool) -> None:
    """A command that fails, or one that succeeds without a word, is taken neither for a job that is there nor gone."""
    for name in ("curl", "qstat", "condor_q", "condor_history", "flux", "bjobs", "nomad"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {int(fails)}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "token").write_text("secret")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RAY_API_SERVER_ADDRESS": "http://ray"}
    environment["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "token")
    arguments = ["check", "7"] if "ray-job" in block.text else ["7"]
    command = ["sh", "-c", block.text, "check", *arguments]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode not in (0, 3)


@contextmanager
def running_grid_engine(folder: Path) -> Iterator[dict[str, str]]:
    """Grid Engine with one node; yields the variables that its commands need."""
    if shutil.which("sge_qmaster") is None or os.geteuid() != 0:
        pytest.skip("needs root, and gridengine-master, gridengine-exec and gridengine-client of Debian")
    master, node = find_free_ports(2)
    variables = {"SGE_ROOT": str(folder / "sge"), "SGE_CELL": "default"}
    variables |= {"SGE_QMASTER_PORT": str(master), "SGE_EXECD_PORT": str(node)}
    environment = {**os.environ, **variables}
    try:
        subprocess.run(["sh", "-c", GRID_ENGINE], env=environment, check=True, timeout=STARTS_WITHIN_SECONDS)
        yield variables
    finally:
        for what in (["-ke", "all"], ["-km"]):
            subprocess.run(["qconf", *what], env=environment, check=False, timeout=60)


@contextmanager
def running_ray(folder: Path) -> Iterator[dict[str, str]]:
    """Ray's head with its jobs API behind a token; yields the variables that the recipe needs."""
    if find_spec("aiohttp_cors") is None:
        pytest.skip("needs ray[default]")
    gcs, dashboard = find_free_ports(2)
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the path of a socket may have 107 bytes
    (folder / "token").write_text(secrets.token_hex(32))
    url = f"http://127.0.0.1:{dashboard}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "1"]
    command += ["--port", str(gcs), "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
    command += ["--include-dashboard", "true", "--disable-usage-stats", "--temp-dir", sockets]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]  # any, instead of a range that others use
    variables = {"RAY_API_SERVER_ADDRESS": url, "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    patience = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300", "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300"}
    with running_program(command, RAY_AUTH_MODE="token", **variables, **patience) as head:
        try:
            wait_until(lambda: ask_ray(variables, "GET", "/api/jobs/") is not None, STARTS_WITHIN_SECONDS)
            yield variables
        finally:
            head.terminate()  # it ends what it has started; a kill would leave that
            head.wait(60)
            shutil.rmtree(sockets, ignore_errors=True)


def ask_ray(variables: Mapping[str, str], method: str, path: str, body: object = None) -> object:
    """An answer of Ray's jobs API; None while there is none."""
    headers = {"Authorization": f"Bearer {Path(variables['RAY_AUTH_TOKEN_PATH']).read_text()}"}
    try:
        url = variables["RAY_API_SERVER_ADDRESS"] + path
        response = httpx.request(method, url, json=body, headers=headers, timeout=60, trust_env=False)
        return response.raise_for_status().json()
    except httpx.HTTPError:
        return None


@dataclass(frozen=True)
class Recipe:
    """A recipe of the page, for a scheduler that runs: the script is on the PATH, with the variables that it needs."""

    script: str
    server: FakeServer
    service: FakeService
    folder: Path

    def stop_job(self, labels: dict[str, str]) -> dict[str, object]:
        """Start the receiver as the page does, request the stop of a job, and return the report."""
        is_of_it = f"--check '{self.script} "
        block = next(block for block in read_blocks(PAGE) if block.language == "sh" and is_of_it in block.text)
        (command,) = [line for line in read_commands(block) if line.startswith("evalstop-receiver")]
        with ExitStack() as stack:
            receiver = ReceiverProgram(self.folder, self.server, stack, shlex.split(command)[1:])
            url = receiver.start("--grace-seconds", "120")
            assert post_event(url, make_stop_event(labels)).status_code == 202
            ((_, report),) = wait_until(lambda: self.service.reports, STARTS_WITHIN_SECONDS)
        return dict(report)

    def check(self, *arguments: str) -> int:
        """The exit code of the script."""
        return subprocess.run([self.script, *arguments], check=False, timeout=60).returncode


@pytest.fixture
def install_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: FakeServer, service: FakeService
) -> Callable[[str, str, Mapping[str, str]], Recipe]:
    """Puts the script of a block on the PATH, and sets the variables that it needs."""

    def install(name: str, script: str, variables: Mapping[str, str]) -> Recipe:
        (tmp_path / script).write_text(read_block(name))
        (tmp_path / script).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return Recipe(script, server, service, tmp_path)

    return install


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_job_of_grid_engine_is_stopped(
    tmp_path: Path, install_recipe: Callable[[str, str, Mapping[str, str]], Recipe]
) -> None:
    """A job is there while it runs, gone once it was cancelled, and the stop is confirmed."""
    with running_grid_engine(tmp_path) as variables:
        recipe = install_recipe("grid engine", "sge-check", variables)
        submit = ["qsub", "-terse", "-o", "/dev/null", "-e", "/dev/null"]
        submitted = subprocess.run(submit, input="exec sleep 600", capture_output=True, text=True, check=True)
        job_id = submitted.stdout.strip()
        wait_until(lambda: f" {job_id} " in subprocess.check_output(["qstat", "-s", "r"], text=True))
        assert recipe.check(job_id) == 0
        report = recipe.stop_job({"scheduler": "sge", "job_id": job_id})
        assert report["state"] == "confirmed"
        assert recipe.check(job_id) == 3


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_job_of_ray_is_stopped_with_a_token(
    tmp_path: Path, install_recipe: Callable[[str, str, Mapping[str, str]], Recipe]
) -> None:
    """A job behind Ray's token is stopped by an API that refuses others; an unknown job is not taken for gone."""
    with running_ray(tmp_path) as variables:
        recipe = install_recipe("ray jobs", "ray-job", variables)
        assert httpx.get(variables["RAY_API_SERVER_ADDRESS"] + "/api/jobs/", trust_env=False).status_code in (401, 403)
        body = {"submission_id": "ppo-7b", "entrypoint": "sleep 600"}
        wait_until(
            lambda: ask_ray(variables, "POST", "/api/jobs/", body) or ask_ray(variables, "GET", "/api/jobs/ppo-7b"),
            STARTS_WITHIN_SECONDS,
        )
        wait_until(lambda: recipe.check("check", "ppo-7b") == 0)
        assert recipe.check("check", "nobody") not in (0, 3)
        report = recipe.stop_job({"scheduler": "ray", "job_id": "ppo-7b"})
        assert report["state"] == "confirmed"
        assert recipe.check("check", "ppo-7b") == 3

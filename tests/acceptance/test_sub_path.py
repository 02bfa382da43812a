"""The whole product below a path of another host's nginx: pages, help, API, MLflow's client, webhooks and receivers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from evalstop_client import Limits, Run
from evalstop_client.cli import main
from evalstop_client.reading.api import Api
from evalstop_lab.service_process import Service, running_service

from tests.clients.programs import running_program, wait_until
from tests.fixtures.free_ports import find_free_ports

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(300)]

NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location /evalstop/ {{
            proxy_pass http://127.0.0.1:{service_port}{passed_on};
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Prefix /evalstop;
        }}
    }}
}}
"""

MLFLOW_JOB = """
import pathlib, mlflow
with mlflow.start_run(run_name="below a path") as run:
    mlflow.log_metric("eval_accuracy", 0.5, step=1)
    mlflow.log_text("weights", "checkpoints/step_1.pt")
listed = [file.path for file in mlflow.artifacts.list_artifacts(run_id=run.info.run_id, artifact_path="checkpoints")]
copy = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="checkpoints/step_1.pt")
print(*listed, pathlib.Path(copy).read_text())
"""


@pytest.fixture(params=["/", "/evalstop/"], ids=["stripped", "passed_on"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """A service behind an nginx that strips the path or passes it on; its URL is that of the proxy."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    (port,) = find_free_ports(1)
    public_url = f"http://127.0.0.1:{port}/evalstop"
    with running_service(tmp_path / "service", {"EVALSTOP_PUBLIC_URL": public_url}) as behind:
        address = urlsplit(behind.url)
        values = {"folder": tmp_path, "port": port, "service_port": address.port, "passed_on": request.param}
        (tmp_path / "nginx.conf").write_text(NGINX.format(**values))
        with running_program(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]):
            service = Service(public_url, behind.key, behind.sign_in.replace(behind.url, public_url))
            wait_until(lambda: is_ready(service))
            yield service


def is_ready(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}/readyz", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_every_link_leads_somewhere_below_the_path(service: Service) -> None:
    """All links, scripts, styles and forms of all pages and of the help are below the path, and each is answered."""
    with Run("linked", url=service.url, key=service.key, limits=Limits(flush_seconds=60)) as run:
        run.log({"eval": 0.5}, step=1)
    found, seen = [f"{service.url}/"], set[str]()
    with httpx.Client(trust_env=False, follow_redirects=True, timeout=60) as client:
        assert client.get(service.sign_in).status_code == 200
        refused = client.post(f"{service.url}/login", data={"key": "esk_wrong"})
        assert "/evalstop/assets/" in refused.text
        while found:
            url = found.pop()
            if url in seen:
                continue
            seen.add(url)
            answer = client.get(url)
            assert answer.status_code == 200, url
            if answer.headers.get("content-type", "").startswith("text/html"):
                links = re.findall(r'\s(?:href|src)="([^"#]+)', answer.text)
                absolute = {urljoin(str(answer.url), link.replace("&amp;", "&")) for link in links}
                own = {link for link in absolute if urlsplit(link).netloc == urlsplit(service.url).netloc}
                assert {link for link in own if not link.startswith(f"{service.url}/")} == set(), url
                found += [link for link in own if "?" not in link]
    assert len(seen) > 20


def test_mlflows_client_keeps_artifacts(service: Service, tmp_path: Path) -> None:
    """An unmodified client uploads, lists and downloads files, and a checkpoint among them is registered."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "PYTEST"))}
    environment |= {"MLFLOW_TRACKING_URI": f"{service.url}/mlflow", "MLFLOW_TRACKING_TOKEN": service.key}
    command = [sys.executable, "-c", MLFLOW_JOB]
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "checkpoints/step_1.pt weights" in job.stdout, job.stderr[-3000:]
    api = Api(service.url, service.key)
    (checkpoint,) = api.connection.get(f"/runs/{api.run('below a path').id}/checkpoints")["items"]
    assert checkpoint["step"] == 1
    # What the client prints as the run's page is one.
    (page,) = re.findall(r"View run .* at: (\S+)", job.stdout)
    with httpx.Client(trust_env=False, follow_redirects=True) as client:
        client.get(service.sign_in)
        assert client.get(page).status_code == 200


def test_events_and_commands_name_pages_below_the_path(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The `url` of a pulled event is that of the run's page, which answers; the client's and the shell's are too."""
    api = Api(service.url, service.key)
    endpoint = api.connection.post("/pull/endpoints", {"name": "pulls", "event_types": ["run.alert"]})
    with Run("announced", url=service.url, key=service.key, limits=Limits(flush_seconds=60)) as run:
        run.alert("look here")
    assert run.url == f"{service.url}/runs/{run.id}"
    claim = {"wait_seconds": 20, "limit": 1, "lease_seconds": 30}
    (event,) = api.connection.post(f"/pull/endpoints/{endpoint['id']}/claim", claim)["events"]
    assert json.loads(event["body"])["url"] == run.url
    monkeypatch.setenv("EVALSTOP_URL", service.url)
    monkeypatch.setenv("EVALSTOP_KEY", service.key)
    main(["doctor", "announced"])
    assert run.url in capsys.readouterr().out
    with httpx.Client(trust_env=False, follow_redirects=True) as client:
        client.get(service.sign_in)
        assert "announced" in client.get(run.url).text

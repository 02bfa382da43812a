"""The command line against a real service: what it prints, for people and as JSON, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.cli import COMMANDS, main, parser
from evalstop_client.version import __version__

from tests.clients.real_service import Project
from tests.fixtures.http_server import serve_handler

SERVER_PACKAGES = ("fastapi", "sqlalchemy", "pydantic", "uvicorn", "evalstop_service.app")


class Shell:
    """Runs commands with a project's key."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; it has to exit with this code."""
        exit_code = main(arguments)
        output = self._capsys.readouterr()
        assert exit_code == code, output
        return output.out if code == 0 else output.out + output.err

    def read(self, *arguments: str, code: int = 0) -> Any:
        """The JSON document that a command prints."""
        return json.loads(self.run(*arguments, "--json", code=code))


@pytest.fixture
def shell(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("EVALSTOP_URL", project.url)
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    return Shell(capsys)


def test_runs_are_listed_and_shown(shell: Shell, project: Project) -> None:
    """Table and JSON show the same runs."""
    with project.report_run("falls", labels={"team": "x"}), project.report_run("rises", (0.1, 0.2)):
        assert [run["name"] for run in shell.read("runs", "ls")] == ["rises", "falls"]
        assert [run["name"] for run in shell.read("runs", "ls", "--verdict", "stop", "--label", "team=x")] == ["falls"]
        assert len(shell.read("runs", "ls", "--limit", "1")) == 1
        table = shell.run("runs", "ls", "--since", "1d")
        assert all(word in table for word in ("falls", "pending", "paper@1", "verdict"))
        shown = shell.run("runs", "show", "falls")
        assert "3 consecutive declines" in shown
        calls = {line.split()[0]: line.split()[1:3] for line in shown.splitlines() if line.startswith(("k_", "post"))}
        assert (calls["k_decline"], calls["posterior"][0]) == (["no", "4"], "yes")
        assert shell.read("runs", "show", "falls")["labels"] == {"team": "x"}


def test_runs_are_compared_side_by_side(shell: Shell, project: Project) -> None:
    """A column for each run, with its results, and the labels and params in which they differ."""
    for name, values, rate in (("falls", (0.9, 0.8, 0.7, 0.6), "1e-6"), ("rises", (0.1, 0.2), "1e-5")):
        with project.report_run(name, values, labels={"team": "x", "seed": name}, config={"lr": rate}):
            pass
    compared = shell.run("runs", "compare", "falls", "rises").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in compared[1:]}
    assert compared[0].split() == ["falls", "rises"]
    assert (rows["verdict"], rows["lr"], rows["seed"]) == (["stop", "continue"], ["1e-6", "1e-5"], ["falls", "rises"])
    assert "team" not in rows
    assert [run["name"] for run in shell.read("runs", "compare", "rises", "falls")] == ["rises", "falls"]
    assert "no run is called 'nosuch'" in shell.run("runs", "compare", "falls", "nosuch", code=1)


def test_group_gets_a_rule(shell: Shell, project: Project, tmp_path: Path) -> None:
    """A rule is set by its kind or from a file, changed and removed."""
    rule = tmp_path / "rule.json"
    rule.write_text(json.dumps({"kind": "pbt", "ready_steps": 10, "hyperparameters": {"lr": {"high": 0.5}}}))
    terms: dict[str, Any] = {"group": "lr sweep", "population": {"kind": "median", "fewest": 4}, "config": {"lr": 0.25}}
    with project.report_run("slow", (0.1, 0.2), **terms):
        assert shell.read("groups", "rule", "lr sweep", str(rule))["rule"]["ready_steps"] == 10
        assert shell.run("groups", "rule", "lr sweep", "halving") == "group lr sweep has the rule halving\n"
        assert shell.run("groups", "rule", "lr sweep", "none") == "group lr sweep has no rule\n"
        assert project.api.connection.get("/groups")["items"] == []
    assert "kind" in shell.run("groups", "rule", "lr sweep", "best", code=1)
    assert "in JSON" in shell.run("groups", "rule", "lr sweep", "rule.yaml", code=2)


def test_precision_is_shown_by_policy_and_by_detector(shell: Shell, project: Project) -> None:
    """A table has a row for each policy, or for each detector of the policies, with the shares and their intervals."""
    with project.report_run("rises", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)):
        pass
    assert "paper@1" in shell.run("precision")
    table = shell.run("precision", "--by", "detector", "--policy", "paper")
    assert ["posterior", "yes"] in [line.split()[1:3] for line in table.splitlines()]
    assert "0.0 % (0.0 to" in table, "of false stops"
    detectors = {group["detector"]: group["observes"] for group in shell.read("precision", "--by", "detector")}
    assert detectors == {"k_decline": False, "posterior": True}


def test_terminal_without_letters_for_a_name_shows_the_rest(project: Project) -> None:
    """Where the terminal's encoding lacks letters or lines of a table, question marks stand for them."""
    with project.report_run("größe"):
        command = [sys.executable, "-m", "evalstop_client.cli", "runs", "ls"]
        environment = {"EVALSTOP_URL": project.url, "EVALSTOP_KEY": project.key, "PYTHONIOENCODING": "ascii"}
        listed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert "gr??e" in listed.stdout


def test_decisions_are_changed_by_run_name(shell: Shell, project: Project) -> None:
    """Veto, label, stop and undo take a run's name; an impossible change exits with 1 and says why."""
    with project.report_run("falls"):
        (listed,) = shell.read("decisions", "ls", "--state", "pending", "--run", "falls")
        assert "falls" in shell.run("decisions", "ls")
        vetoed = shell.run("decisions", "veto", "falls", "--reason", "curriculum change")
        assert vetoed == "the stop of falls is vetoed\n"
        assert "vetoed" in shell.run("decisions", "release", listed["id"], "--reason", "no", code=1)
        labeled = shell.run("decisions", "label", "falls", "wrong", "--note", "it rose", "--turn-step", "3")
        assert labeled == "the stop of falls is vetoed, and was wrong\n"
        assert shell.run("runs", "stop", "falls", "--reason", "over") == "the stop of falls is requested\n"
        undone = shell.run("decisions", "undo", "falls", "--reason", "not yet")
        assert undone == "the stop of falls is undone\n"
    with project.report_run("over"):
        shell.run("runs", "stop", "over", "--reason", "over")
        (stop,) = shell.read("decisions", "ls", "--run", "over")
        project.api.connection.post(f"/decisions/{stop['id']}/report", {"state": "confirmed"})
    undone = shell.run("decisions", "undo", "over", "--reason", "too late")
    assert undone == "the stop of over is undone; the run has ended: nothing resumes\n"
    with project.report_run("rises", (0.1, 0.2)):
        assert "no decision" in shell.run("decisions", "veto", "rises", "--reason", "x", code=1)


def test_project_settings_are_changed(shell: Shell, project: Project) -> None:
    """Numbers, strings, lists and none are set as in the API; an invalid name or value is named."""
    arguments = ("max_mode=enforce", "held_out_share=0", "allowed_policies=default,early", "stops_per_hour=none")
    assert "enforce" in shell.run("project", "set", *arguments)
    settings = shell.read("project", "show")
    assert (settings["max_mode"], settings["held_out_share"], settings["stops_per_hour"]) == ("enforce", 0.0, None)
    assert settings["allowed_policies"] == ["default", "early"]
    assert project.name in shell.run("project", "show")
    for policies, allowed in (("none", []), ("any", None)):
        assert shell.run("project", "set", f"allowed_policies={policies}").split() == ["allowed_policies", policies]
        assert shell.read("project", "show")["allowed_policies"] == allowed
    for panel, stored in (("focus, divergence", ["focus", "divergence"]), ("none", []), ("shipped", None)):
        assert shell.run("project", "set", f"panel={panel}").split(maxsplit=1) == ["panel", f"{panel}\n"]
        assert shell.read("project", "show")["panel"] == stored
    for wrong, message in (("panel=loud", "k_decline"), ("mode=enforce", "mode"), ("max_mode=loud", "max_mode")):
        assert message in shell.run("project", "set", wrong, code=1)
    assert "NAME=VALUE" in shell.run("project", "set", "max_mode", code=2)
    assert "quotas" in shell.run("project", "set", "quotas=1", code=1)


def test_project_is_paused_and_resumed(shell: Shell, project: Project) -> None:
    """A second pause says that one is there, and the reason is kept."""
    for already in ("", " (it was paused already"):
        paused = shell.run("pause", "--reason", "the eval set is broken")
        assert paused.startswith(f"project {project.name} is paused by key test: nothing is stopped{already}")
    assert shell.read("project", "show")["paused_reason"] == "the eval set is broken"
    assert shell.run("resume") == f"project {project.name} is resumed\n"


def test_stop_may_need_a_second_person(shell: Shell, project: Project) -> None:
    """In a project with second_person a stop by hand is only proposed, and the command says so."""
    shell.run("project", "set", "second_person=yes")
    with project.report_run("rises", (0.1, 0.2)):
        assert "another person" in shell.run("runs", "stop", "rises", "--reason", "over", code=1)
        assert project.api.run("rises").decision is None


def test_proposals_are_settled_by_another_person(
    shell: Shell, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one person proposes another one lists, and refuses or confirms; it is then carried out."""
    lee = shell.run("key", "create", "--name", "lee", "--scopes", "admin").strip()
    shell.run("project", "set", "second_person=yes", "max_mode=shadow", "default_mode=shadow")
    for action, state in (("refuse", "refused"), ("confirm", "confirmed")):
        refused = shell.run("project", "set", "max_mode=enforce", code=1)
        (proposal,) = shell.read("proposals", "ls")
        assert f"evalstop proposals confirm {proposal['id']}" in refused
        assert proposal["summary"] in shell.run("proposals", "ls")
        monkeypatch.setenv("EVALSTOP_KEY", lee)
        settled = shell.run("proposals", action, proposal["id"])
        monkeypatch.setenv("EVALSTOP_KEY", project.key)
        assert settled == f"{state}: {proposal['summary']}\n"
    assert shell.read("proposals", "ls") == []
    assert shell.read("project", "show")["max_mode"] == "enforce"


def test_policies_are_stored_and_staged(shell: Shell, tmp_path: Path) -> None:
    """A policy of a file becomes the next version; its rollout starts in shadow, and is not promoted without cases."""
    file = tmp_path / "ours.json"
    member = {"detector": "k_decline", "params": {"k": 4}}
    file.write_text(json.dumps({"name": "ours", "members": [member]}))
    assert shell.run("policy", "add", str(file)) == "stored ours@1\n"
    assert "in JSON" in shell.run("policy", "add", "ours", code=2)
    assert shell.run("policy", "stage", "ours", "--required-precision", "0.9") == "policy ours is in shadow\n"
    assert "has not earned one" in shell.run("policy", "promote", "ours", code=1)
    assert "shadow" in shell.run("policy", "demote", "ours", "--reason", "x", code=1)


def test_keys_are_created_listed_and_revoked(shell: Shell, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the secret is printed; it is valid until it is revoked."""
    secret = shell.run("key", "create", "--name", "reader", "--scopes", "read", "--expires-in-days", "1").strip()
    monkeypatch.setenv("EVALSTOP_KEY", secret)
    assert shell.read("runs", "ls") == []
    assert "needs admin" in shell.run("key", "ls", code=1)
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    assert {key["name"] for key in shell.read("key", "ls")} == {"test", "reader"}
    assert "reader" in shell.run("key", "ls")
    assert shell.run("key", "revoke", "reader") == "key reader was revoked\n"
    monkeypatch.setenv("EVALSTOP_KEY", secret)
    assert "401" in shell.run("runs", "ls", code=1)
    monkeypatch.setenv("EVALSTOP_KEY", project.key)
    assert "none of them has the name 'reader'" in shell.run("key", "revoke", "reader", code=1)


def test_endpoints_are_added_tested_and_removed(shell: Shell) -> None:
    """The secret is printed once, a failed test exits with 1, and a pull endpoint can be added and removed."""
    assert shell.run("endpoint", "add", "http://127.0.0.1:9/").startswith("whsec_")
    (listed,) = shell.read("endpoint", "ls")
    assert "run.stop_requested" in listed["event_types"]
    assert "http://127.0.0.1:9/" in shell.run("endpoint", "ls")
    assert ["delivered", "no"] in [
        line.split() for line in shell.run("endpoint", "test", "http://127.0.0.1:9/", code=1).splitlines()
    ]
    assert shell.run("endpoint", "rotate", "http://127.0.0.1:9/").startswith("whsec_")
    assert shell.read("endpoint", "deliveries", "--since", "15m", "--state", "dead") == []
    assert shell.read("endpoint", "test", listed["id"], code=1)["delivered"] is False
    assert shell.run("endpoint", "rm", "http://127.0.0.1:9/") == "endpoint http://127.0.0.1:9/ was removed\n"
    assert "none of them has the url" in shell.run("endpoint", "rm", "http://127.0.0.1:9/", code=1)
    shell.run("endpoint", "add", "pull:login-node")
    assert [item["url"] for item in shell.read("endpoint", "ls")] == ["pull:login-node"]
    shell.run("endpoint", "rm", "pull:login-node")
    assert shell.read("endpoint", "ls") == []


def test_failed_endpoint_test_prints_the_answer(shell: Shell) -> None:
    """A receiver that refuses a test says why in its answer, such as that it has another secret."""

    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"compare the secret")

    with serve_handler(Refusal) as url:
        shell.run("endpoint", "add", url)
        printed = shell.run("endpoint", "test", url, code=1)
        shell.run("endpoint", "rm", url)
    facts = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert (facts["delivered"], facts["status_code"], facts["answer"]) == ("no", "401", "compare the secret")


@pytest.mark.parametrize(
    "arguments",
    [
        ("key", "create", "--name", "x", "--expires-in-days", "-1"),
        ("key", "create", "--name", "x", "--expires-in-days", "nan"),
        ("key", "create", "--name", "x", "--expires-in-days", "soon"),
        ("runs", "ls", "--limit", "-1"),
        ("runs", "ls", "--limit", "2.5"),
        ("decisions", "ls", "--limit", "-1"),
    ],
)
def test_impossible_numbers_are_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
    """A number that no date or list can have exits with 2, and the message names its option."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"{arguments[-2]}: {arguments[-1]}: it must be" in capsys.readouterr().err


def test_missing_things_are_named(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing key exits with 2, a missing service, run or policy with 1, each with a message."""
    assert "no run is called" in shell.run("runs", "show", "nosuch", code=1)
    assert "since" in shell.run("runs", "ls", "--since", "soon", code=2)
    assert "ours.json" in shell.run("policy", "add", str(tmp_path / "ours.json"), code=2)
    assert "Connect" in shell.run("runs", "ls", "--url", "http://127.0.0.1:1", code=1)
    monkeypatch.delenv("EVALSTOP_KEY")
    assert "EVALSTOP_KEY" in shell.run("runs", "ls", code=2)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` of a command exits with 0, and the command is listed."""
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: evalstop {name}")
    assert name in parser().format_help().split()


class FakeExtension:
    """The commands of another distribution."""

    COMMANDS: Mapping[str, str] = {"fly": "Leave the ground."}

    def main(self, arguments: Sequence[str]) -> int:
        return 7


def test_commands_of_extensions_are_listed() -> None:
    """The help lists commands of other distributions separately, or names the distribution that has them."""
    assert "evalstop-service" in parser().format_help()
    assert "fly                  Leave the ground." in parser([FakeExtension()]).format_help()


def test_commands_import_no_server_packages() -> None:
    """Version, help and lists do not import the web framework, nor does the service's own entry point."""
    script = """
import sys
from evalstop_client.cli import main
for arguments in (["--version"], ["--help"], ["runs", "ls", "--help"]):
    try:
        main(arguments)
    except SystemExit:
        pass
assert main(["runs", "ls", "--url", "http://127.0.0.1:1"]) == 1
import evalstop_service.cli
print(sorted(set(sys.argv[1:]) & set(sys.modules)))
"""
    command = [sys.executable, "-c", script, *SERVER_PACKAGES]
    completed = subprocess.run(command, env={"EVALSTOP_KEY": "esk_x"}, capture_output=True, text=True, check=True)
    assert completed.stdout.startswith(f"evalstop {__version__}\n")
    assert completed.stdout.splitlines()[-1] == "[]"
